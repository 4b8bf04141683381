//! Scaling by Pillow's bicubic filter, to the last bit: what the reference scales with, so that an image's soft tokens are the
//! reference's too.
//!
//! Source of the method: Pillow's libImaging, its file Resample: a filter as wide as the scale, weights of 22 bits, across before
//! down, each pass rounded to 8 bits.

use super::Picture;

/// Bits behind the point of a weight.
const PRECISION_BITS: u32 = 32 - 8 - 2;
/// Of the filter, in pixels of the smaller image.
const SUPPORT: f64 = 2.0;

/// The source pixels that one pixel is made of.
#[derive(Debug)]
struct Window {
    first: usize,
    weights: Vec<i32>,
}

/// Keys' cubic with a = -0.5.
fn bicubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

fn windows(from: u32, to: u32) -> Vec<Window> {
    let scale = f64::from(from) / f64::from(to);
    let filter_scale = scale.max(1.0);
    let support = SUPPORT * filter_scale;
    let window = |at: u32| {
        let center = (f64::from(at) + 0.5) * scale;
        // Truncated towards zero, and not below it.
        let first = (center - support + 0.5) as u32;
        let end = ((center + support + 0.5) as u32).min(from);
        let weight = |at: u32| bicubic((f64::from(at) - center + 0.5) * (1.0 / filter_scale));
        let weights: Vec<f64> = (first..end).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: &f64| {
            let scaled = if sum == 0.0 { *weight } else { weight / sum } * f64::from(1 << PRECISION_BITS);
            if scaled < 0.0 { (scaled - 0.5) as i32 } else { (scaled + 0.5) as i32 }
        };
        Window { first: first as usize, weights: weights.iter().map(fixed).collect() }
    };
    (0..to).map(window).collect()
}

fn rounded(sum: i32) -> u8 {
    (sum >> PRECISION_BITS).clamp(0, 255) as u8
}

/// `picture` at `width` × `height` pixels, both at least 1.
pub(super) fn resize(picture: Picture, width: u32, height: u32) -> Picture {
    let picture = if picture.width == width { picture } else { across(&picture, width) };
    if picture.height == height { picture } else { down(&picture, height) }
}

fn across(picture: &Picture, width: u32) -> Picture {
    let windows = windows(picture.width, width);
    let mut pixels = vec![0; 3 * width as usize * picture.height as usize];
    let rows = picture.pixels.chunks_exact(3 * picture.width as usize);
    for (row, out) in rows.zip(pixels.chunks_exact_mut(3 * width as usize)) {
        let row = row.as_chunks::<3>().0;
        for (out, Window { first, weights }) in out.as_chunks_mut::<3>().0.iter_mut().zip(&windows) {
            let mut sums = [1 << (PRECISION_BITS - 1); 3];
            for (pixel, weight) in row[*first..].iter().zip(weights) {
                for (sum, value) in sums.iter_mut().zip(pixel) {
                    *sum += i32::from(*value) * weight;
                }
            }
            *out = sums.map(rounded);
        }
    }
    Picture { width, height: picture.height, pixels }
}

fn down(picture: &Picture, height: u32) -> Picture {
    let row_bytes = 3 * picture.width as usize;
    let mut pixels = Vec::with_capacity(row_bytes * height as usize);
    let mut sums = vec![0; row_bytes];
    for Window { first, weights } in windows(picture.height, height) {
        sums.fill(1 << (PRECISION_BITS - 1));
        for (row, weight) in picture.pixels[first * row_bytes..].chunks_exact(row_bytes).zip(&weights) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += i32::from(*value) * weight;
            }
        }
        pixels.extend(sums.iter().copied().map(rounded));
    }
    Picture { width: picture.width, height, pixels }
}
