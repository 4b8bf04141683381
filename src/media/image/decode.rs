//! Files into pixels: 8 bits of red, green and blue, the way up that a person sees them.

use std::fs::File;
use std::io::{Cursor, Read};
use std::panic::{AssertUnwindSafe, catch_unwind};

use image::{
    DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits,
    error::{LimitErrorKind, UnsupportedErrorKind},
};

use super::ImageError;
use super::content::{HEAD_BYTES, format_of};
use crate::media::{MediaSource, StoredError, stored_bytes};

/// Bytes of a file at most.
pub const BYTES_MAX: u64 = 256 << 20;
/// Pixels of an image at most; a camera's largest have about that many.
pub const PIXELS_MAX: u64 = 120_000_000;
/// What a decoder may hold besides the file, at 8 bytes a pixel of the largest image.
const ALLOCATED_BYTES_MAX: u64 = 8 * PIXELS_MAX + (64 << 20);

/// `width` × `height` pixels, row by row, red, green and blue of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    pub width: u32,
    pub height: u32,
    pub pixels: Vec<u8>,
}

impl Picture {
    /// Reads, decodes and turns an image: the first of an animation or of several pages, transparent parts over white, colours as
    /// they are stored (no profile is applied), orientation as EXIF says.
    ///
    /// # Errors
    /// What is wrong with the file, in a sentence with its remedy. A decoder that panics is one of them.
    pub fn open(source: &MediaSource) -> Result<Self, ImageError> {
        match source {
            MediaSource::File(path) => {
                Self::stored_bytes(source)?;
                let mut bytes = Vec::new();
                let mut file = File::open(path).map_err(ImageError::read)?.take(BYTES_MAX + 1);
                // What is no image is not read whole.
                file.by_ref().take(HEAD_BYTES as u64).read_to_end(&mut bytes).map_err(ImageError::read)?;
                format_of(&bytes)?;
                file.read_to_end(&mut bytes).map_err(ImageError::read)?;
                Self::decode(&bytes)
            }
            MediaSource::Bytes { bytes, .. } => Self::decode(bytes),
        }
    }

    /// Bytes of an image that may be opened.
    ///
    /// # Errors
    /// Those of [`Picture::open`] that are known without opening it.
    pub fn stored_bytes(source: &MediaSource) -> Result<u64, ImageError> {
        let bytes = stored_bytes(source)?;
        check_bytes(bytes)?;
        Ok(bytes)
    }

    /// [`Picture::open`] of a file's content.
    pub fn decode(bytes: &[u8]) -> Result<Self, ImageError> {
        check_bytes(bytes.len() as u64)?;
        let (format, name) = format_of(&bytes[..bytes.len().min(HEAD_BYTES)])?;
        catch_unwind(AssertUnwindSafe(|| decode(bytes, format, name))).unwrap_or(Err(ImageError::BrokeDown { format: name }))
    }
}

fn check_bytes(bytes: u64) -> Result<(), ImageError> {
    match bytes {
        0 => Err(StoredError::Empty.into()),
        bytes if bytes > BYTES_MAX => {
            Err(ImageError::TooMuch { what: format!("{bytes} bytes"), limit: format!("{} MiB", BYTES_MAX >> 20) })
        }
        _ => Ok(()),
    }
}

fn decode(bytes: &[u8], format: ImageFormat, name: &'static str) -> Result<Picture, ImageError> {
    if format == ImageFormat::Jpeg && is_cut_off(bytes) {
        return Err(ImageError::damaged(name, "it ends in the middle of the picture"));
    }
    let failed = |error: image::ImageError| explain(error, name);
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(ALLOCATED_BYTES_MAX);
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(failed)?;
    let (width, height) = decoder.dimensions();
    let pixels = u64::from(width) * u64::from(height);
    if pixels == 0 {
        return Err(ImageError::damaged(name, format!("it has {width} × {height} pixels")));
    }
    if pixels > PIXELS_MAX {
        let what = format!("{width} × {height} pixels");
        return Err(ImageError::TooMuch { what, limit: format!("{} million", PIXELS_MAX / 1_000_000) });
    }
    let orientation = decoder.orientation().map_err(failed)?;
    let mut image = DynamicImage::from_decoder(decoder).map_err(failed)?;
    image.apply_orientation(orientation);
    let (width, height) = (image.width(), image.height());
    Ok(Picture { width, height, pixels: rgb8(image) })
}

/// 16 bits lose their lower half, as Pillow has it; what is transparent lets white through.
fn rgb8(image: DynamicImage) -> Vec<u8> {
    let high = |value: u16| (value >> 8) as u8;
    match image {
        DynamicImage::ImageRgb8(image) => image.into_raw(),
        DynamicImage::ImageLuma8(image) => image.into_raw().into_iter().flat_map(|grey| [grey; 3]).collect(),
        DynamicImage::ImageLumaA8(image) => {
            let raw = image.into_raw();
            raw.as_chunks().0.iter().flat_map(|&[grey, alpha]| [over_white(grey, alpha); 3]).collect()
        }
        DynamicImage::ImageRgba8(image) => {
            let raw = image.into_raw();
            raw.as_chunks().0.iter().flat_map(|&[r, g, b, alpha]| [r, g, b].map(|value| over_white(value, alpha))).collect()
        }
        DynamicImage::ImageLuma16(image) => image.into_raw().into_iter().flat_map(|grey| [high(grey); 3]).collect(),
        DynamicImage::ImageRgb16(image) => image.into_raw().into_iter().map(high).collect(),
        DynamicImage::ImageLumaA16(image) => {
            let raw = image.into_raw();
            raw.as_chunks().0.iter().flat_map(|&[grey, alpha]| [over_white(high(grey), high(alpha)); 3]).collect()
        }
        DynamicImage::ImageRgba16(image) => {
            let raw = image.into_raw();
            let pixels = raw.as_chunks().0.iter();
            pixels.flat_map(|&[r, g, b, alpha]| [r, g, b].map(|value| over_white(high(value), high(alpha)))).collect()
        }
        // Of TIFF alone: numbers from 0 to 1.
        DynamicImage::ImageRgba32F(image) => {
            let raw = image.into_raw();
            let pixels = raw.as_chunks().0.iter();
            pixels.flat_map(|&[r, g, b, alpha]| [r, g, b].map(|value| over_white(of_unit(value), of_unit(alpha)))).collect()
        }
        other => other.into_rgb8().into_raw(),
    }
}

fn of_unit(value: f32) -> u8 {
    (value.clamp(0.0, 1.0) * 255.0).round() as u8
}

fn over_white(value: u8, alpha: u8) -> u8 {
    let (value, alpha) = (u32::from(value), u32::from(alpha));
    ((value * alpha + 255 * (255 - alpha) + 127) / 255) as u8
}

/// Whether a JPEG has no end-of-image marker behind its first scan: its decoder fills in what is missing. Source: ITU-T T.81, B.1.
fn is_cut_off(bytes: &[u8]) -> bool {
    const START_OF_SCAN: u8 = 0xda;
    let mut at = 2;
    loop {
        let Some(&[0xff, marker, ref rest @ ..]) = bytes.get(at..) else { return true };
        match marker {
            START_OF_SCAN => return memchr::memmem::find(&bytes[at..], &[0xff, 0xd9]).is_none(),
            // Fill bytes and markers without a length.
            0xff => at += 1,
            0x01 | 0xd0..=0xd8 => at += 2,
            _ => match rest.first_chunk() {
                Some(length) => at += 2 + usize::from(u16::from_be_bytes(*length)).max(2),
                None => return true,
            },
        }
    }
}

fn explain(error: image::ImageError, format: &'static str) -> ImageError {
    match error {
        image::ImageError::Unsupported(error) => {
            let what = match error.kind() {
                UnsupportedErrorKind::Color(_) | UnsupportedErrorKind::ColorLayout(_) => "with colours stored in a rare way",
                _ => "of a rare kind",
            };
            ImageError::Unsupported { what: format!("a {format} file {what}") }
        }
        image::ImageError::Limits(error) if matches!(error.kind(), LimitErrorKind::InsufficientMemory) => {
            let limit = format!("{} MiB", ALLOCATED_BYTES_MAX >> 20);
            ImageError::TooMuch { what: "more to be unpacked".to_owned(), limit }
        }
        image::ImageError::IoError(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
            ImageError::damaged(format, "it ends in the middle of the picture")
        }
        image::ImageError::IoError(_) => ImageError::damaged(format, "its content breaks off or contradicts itself"),
        // What decoders say of it speaks of their own insides.
        _ => ImageError::damaged(format, "its content contradicts itself, as after a faulty download or copy"),
    }
}
