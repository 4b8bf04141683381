//! What Gemma 4's vision tower sees of an image. Source: `Gemma4ImageProcessor` in mlx-vlm's `processing_gemma4.py` and
//! `image_processing_pil_gemma4.py` of transformers.

use super::resize::resize;
use super::{ImageError, Picture};

/// Pixels: more than any model's, whose square is still a number.
const PATCH_SIZE_MAX: u32 = 4096;

/// How a model's processor cuts images.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PatchRule {
    /// Side of a patch in pixels.
    pub patch_size: u32,
    /// Side of the square of patches that becomes a soft token.
    pub pooling_kernel_size: u32,
    /// Soft tokens of an image at most.
    pub soft_tokens_max: u32,
    /// What a stored value of 0 to 255 is multiplied by.
    pub rescale_factor: f32,
}

impl Default for PatchRule {
    fn default() -> Self {
        Self { patch_size: 16, pooling_kernel_size: 3, soft_tokens_max: 280, rescale_factor: 1.0 / 255.0 }
    }
}

/// An image as the tower is given it: `rows` × `columns` patches, row by row; of each its pixels, row by row; of each pixel red,
/// green and blue. The patch at (row, column) stands at the position (x = column, y = row).
#[derive(Debug, Clone, PartialEq)]
pub struct Patches {
    /// `rows * columns` × `3 * patch_size * patch_size`, from 0 to 1.
    pub values: Vec<f32>,
    /// Patches across and down; the pooling's kernel divides both.
    pub columns: u32,
    pub rows: u32,
    /// Embeddings that the tower makes of it.
    pub soft_tokens: u32,
}

impl PatchRule {
    /// The same rule where each patch becomes a soft token by itself: the square that is pooled otherwise is one patch. Images are
    /// scaled alike. Source: `Gemma4UnifiedImageProcessor` of transformers and mlx-vlm.
    pub fn of_whole_tokens(self) -> Self {
        Self {
            patch_size: self.patch_size.saturating_mul(self.pooling_kernel_size).min(PATCH_SIZE_MAX),
            pooling_kernel_size: 1,
            ..self
        }
    }

    /// An image scaled and cut.
    ///
    /// # Errors
    /// [`ImageError::NoPatches`], where the tokens allowed do not suffice for a patch.
    pub fn patches(&self, picture: Picture) -> Result<Patches, ImageError> {
        let (width, height) = self.size(picture.width, picture.height)?;
        let picture = resize(picture, width, height);
        let side = self.patch_size as usize;
        let (columns, rows) = (width / self.patch_size, height / self.patch_size);
        let row_bytes = 3 * width as usize;
        let mut values = Vec::with_capacity(picture.pixels.len());
        for band in picture.pixels.chunks_exact(side * row_bytes) {
            for column in 0..columns as usize {
                for row in band.chunks_exact(row_bytes) {
                    let pixels = &row[3 * side * column..3 * side * (column + 1)];
                    values.extend(pixels.iter().map(|value| f32::from(*value) * self.rescale_factor));
                }
            }
        }
        Ok(Patches { values, columns, rows, soft_tokens: columns * rows / self.pooling_kernel_size.pow(2) })
    }

    /// The largest width and height of about the image's proportions that have no more patches than are allowed, both multiples
    /// of what a soft token covers. In the reference's order and precision (`aspect_ratio_preserving_resize`).
    pub fn size(&self, width: u32, height: u32) -> Result<(u32, u32), ImageError> {
        let side = self.pooling_kernel_size * self.patch_size;
        let patches_max = f64::from(self.soft_tokens_max) * f64::from(self.pooling_kernel_size.pow(2));
        let pixels = patches_max * f64::from(self.patch_size.pow(2));
        let factor = (pixels / (f64::from(height) * f64::from(width))).sqrt();
        let sides = |length: u32| (factor * f64::from(length) / f64::from(side)).floor() as u32 * side;
        // A strip is one soft token thick.
        let strip = |long: u32, short: u32| (long / short).min(self.soft_tokens_max) * side;
        match (sides(width), sides(height)) {
            (0, 0) => Err(ImageError::NoPatches { width, height, soft_tokens: self.soft_tokens_max }),
            (_, 0) => Ok((strip(width, height), side)),
            (0, _) => Ok((side, strip(height, width))),
            size => Ok(size),
        }
    }
}
