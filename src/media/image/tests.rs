//! What is wrong with a file, and what it may take.

use std::io::Cursor;
use std::path::Path;

use image::{DynamicImage, ImageFormat, RgbImage};
use proptest::prelude::*;

use super::{ImageError, PatchRule, Picture, is_image_name};
use crate::media::{MediaSource, StoredError};

fn encoded(format: ImageFormat) -> Vec<u8> {
    let image = RgbImage::from_fn(40, 30, |x, y| image::Rgb([(x * 6) as u8, (y * 8) as u8, (x * y) as u8]));
    let mut bytes = Cursor::new(Vec::new());
    DynamicImage::ImageRgb8(image).write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

#[track_caller]
fn fails(bytes: &[u8], expected: &str) {
    let error = Picture::decode(bytes).unwrap_err().to_string();
    assert!(error.contains(expected), "{error:?} does not say {expected:?}");
}

#[test]
fn other_content_is_named() {
    fails(b"", "empty (0 bytes)");
    fails(b"RIFF\0\0\0\0WAVEfmt ", "not an image: its content is a recording or film (WAV)");
    fails(b"%PDF-1.7", "a PDF document");
    fails(b"<!DOCTYPE html><html>", "an HTML page; a download may have failed");
    fails(b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer");
    fails(b"BMW is a car", "text, beginning with `BMW is a car`");
    fails(b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miaf", "AVIF is not decoded here; convert the file to PNG or JPEG");
    fails(b"\0\0\0\x1cftypheic\0\0\0\0mif1heic", "HEIC is not decoded here");
    fails(b"\0\0\0\x1cftypisom\0\0\0\0mp41mp42", "a recording or film (MP4)");
    fails(b"8BPS\0\x01", "a Photoshop document is not decoded here");
    let missing = Picture::open(&MediaSource::File("/no/such/image.png".into()));
    assert!(matches!(missing, Err(ImageError::Stored(StoredError::Missing))));
    assert!(matches!(Picture::open(&MediaSource::File("/".into())), Err(ImageError::Stored(StoredError::Folder))));
}

#[test]
fn a_bomb_is_refused_before_it_is_unpacked() {
    // A PNG of 65,000 × 65,000 pixels, by its header.
    let mut png = encoded(ImageFormat::Png);
    png[16..24].copy_from_slice(&[0, 0, 0xfd, 0xe8, 0, 0, 0xfd, 0xe8]);
    let sum = crc(&png[12..29]);
    png[29..33].copy_from_slice(&sum.to_be_bytes());
    fails(&png, "65000 × 65000 pixels, more than 120 million, which is the limit here");
    let mut bmp = encoded(ImageFormat::Bmp);
    bmp[18..26].copy_from_slice(&[0xe8, 0xfd, 0, 0, 0xe8, 0xfd, 0, 0]);
    fails(&bmp, "more than 120 million");
    let mut gif = encoded(ImageFormat::Gif);
    gif[6..10].copy_from_slice(&[0xff; 4]);
    fails(&gif, "more than 120 million");
}

/// PNG specification, annex D.
fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum, &byte| {
        (0..8).fold(sum ^ u32::from(byte), |sum: u32, _| if sum & 1 == 1 { 0xedb8_8320 ^ sum >> 1 } else { sum >> 1 })
    })
}

#[test]
fn a_file_that_ends_early_is_damaged() {
    for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Bmp, ImageFormat::Tiff, ImageFormat::Gif] {
        let whole = encoded(format);
        assert!(Picture::decode(&whole).is_ok(), "{format:?}");
        for bytes in [whole.len() / 3, whole.len() / 2, whole.len() * 3 / 4] {
            let cut = Picture::decode(&whole[..bytes]);
            assert!(
                matches!(cut, Err(ImageError::Damaged { .. } | ImageError::BrokeDown { .. })),
                "{format:?} of {bytes}: {cut:?}"
            );
        }
    }
}

/// Nobody who reads a failed row knows the insides of a decoder.
#[test]
fn damage_is_told_in_words_of_ours() {
    let ours = [
        "it ends in the middle of the picture",
        "its content breaks off or contradicts itself",
        "its content contradicts itself, as after a faulty download or copy",
    ];
    let mut damaged = 0;
    for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Bmp, ImageFormat::Tiff, ImageFormat::Gif] {
        let whole = encoded(format);
        for at in (0..whole.len()).step_by(whole.len() / 150 + 1) {
            let mut bytes = whole.clone();
            bytes[at] ^= 0xff;
            match Picture::decode(&bytes) {
                Err(ImageError::Damaged { reason, .. }) => {
                    damaged += 1;
                    assert!(ours.contains(&&*reason) || reason.ends_with(" pixels"), "{format:?} at {at}: {reason}");
                }
                Err(ImageError::Unsupported { what }) => {
                    assert!(what.starts_with("a ") && !what.contains(['`', '(']), "{format:?} at {at}: {what}");
                }
                Ok(_) | Err(_) => {}
            }
        }
    }
    assert!(damaged > 100, "{damaged}");
    let mut png = encoded(ImageFormat::Png);
    let data = png.windows(4).position(|name| name == b"IDAT").unwrap() + 20;
    png[data] ^= 0xff;
    fails(&png, "the PNG file is damaged: its content contradicts itself, as after a faulty download or copy; obtain it again");
}

#[test]
fn the_smallest_and_the_narrowest() {
    for (width, height, soft_tokens) in [(1, 1, 256), (1, 5000, 280), (5000, 1, 280), (3, 2, 260)] {
        let picture = Picture { width, height, pixels: vec![7; 3 * (width * height) as usize] };
        let patches = PatchRule::default().patches(picture).unwrap();
        assert_eq!(patches.soft_tokens, soft_tokens, "{width} × {height}");
        assert_eq!(patches.values.len(), (patches.rows * patches.columns) as usize * 768);
        assert!(patches.values.iter().all(|value| *value == 7.0 * (1.0 / 255.0)), "a plain colour stays what it is");
    }
    let none = PatchRule { soft_tokens_max: 0, ..PatchRule::default() };
    let picture = Picture { width: 2, height: 2, pixels: vec![0; 12] };
    assert!(matches!(none.patches(picture), Err(ImageError::NoPatches { .. })));
}

#[test]
fn names_of_any_case() {
    for (name, expected) in
        [("a.JPG", true), ("b/c.webp", true), ("a.heic", true), ("a.txt", false), ("png", false), (".png", false)]
    {
        assert_eq!(is_image_name(Path::new(name)), expected, "{name}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn damage_anywhere_is_a_picture_or_a_sentence(at in any::<prop::sample::Index>(), byte: u8, which in 0..6_usize) {
        use ImageFormat::{Bmp, Gif, Jpeg, Png, Tiff, WebP};
        let mut bytes = encoded([Png, Jpeg, WebP, Bmp, Tiff, Gif][which]);
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(picture) = Picture::decode(&bytes) {
            prop_assert_eq!(picture.pixels.len() as u64, 3 * u64::from(picture.width) * u64::from(picture.height));
        }
    }

    #[test]
    fn every_size_fits_the_tokens(width in 1..20_000_u32, height in 1..20_000_u32, soft_tokens_max in 1..1120_u32) {
        let rule = PatchRule { soft_tokens_max, ..PatchRule::default() };
        if let Ok((width, height)) = rule.size(width, height) {
            prop_assert!(width > 0 && height > 0 && width % 48 == 0 && height % 48 == 0);
            prop_assert!(width / 48 * (height / 48) <= soft_tokens_max);
        }
    }
}
