//! What a file is, by its first bytes: a name says which files of a folder are rows, and nothing else.

use std::path::Path;

use image::ImageFormat;

use super::ImageError;
use crate::media::probe;

/// Bytes that tell every kind apart.
pub(super) const HEAD_BYTES: usize = 4096;

/// Extensions of files that are images. Those that are not decoded count too: their rows say so.
const EXTENSIONS: [&str; 16] =
    ["png", "apng", "jpg", "jpeg", "jpe", "jfif", "webp", "gif", "tif", "tiff", "bmp", "dib", "avif", "heic", "heif", "jxl"];

/// Whether a file's name is that of an image.
pub fn is_image_name(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| EXTENSIONS.iter().any(|known| extension.eq_ignore_ascii_case(known)))
}

/// What decodes it, and its name.
///
/// # Errors
/// [`ImageError::Unsupported`] of an image in another format, [`ImageError::NotImage`] of all else.
pub(super) fn format_of(head: &[u8]) -> Result<(ImageFormat, &'static str), ImageError> {
    let at = |from: usize, what: &[u8]| head.get(from..).is_some_and(|rest| rest.starts_with(what));
    if at(0, b"RIFF") && at(8, b"WEBP") {
        return Ok((ImageFormat::WebP, "WebP"));
    }
    let starts: [(&[u8], ImageFormat, &'static str); 8] = [
        (b"\x89PNG\r\n\x1a\n", ImageFormat::Png, "PNG"),
        (&[0xff, 0xd8, 0xff], ImageFormat::Jpeg, "JPEG"),
        (b"GIF87a", ImageFormat::Gif, "GIF"),
        (b"GIF89a", ImageFormat::Gif, "GIF"),
        (b"II\x2a\0", ImageFormat::Tiff, "TIFF"),
        (b"MM\0\x2a", ImageFormat::Tiff, "TIFF"),
        (b"II\x2b\0", ImageFormat::Tiff, "BigTIFF"),
        (b"MM\0\x2b", ImageFormat::Tiff, "BigTIFF"),
    ];
    if let Some((_, format, name)) = starts.iter().find(|(start, ..)| head.starts_with(start)) {
        return Ok((*format, name));
    }
    // "BM" alone begins many a text; the reserved words of a file's header are zero.
    if at(0, b"BM") && at(6, &[0; 4]) {
        return Ok((ImageFormat::Bmp, "BMP"));
    }
    if let Some(what) = undecoded(head) {
        return Err(ImageError::Unsupported { what: what.to_owned() });
    }
    Err(ImageError::NotImage { content: probe::content(head) })
}

/// Images that nothing here decodes.
fn undecoded(head: &[u8]) -> Option<&'static str> {
    if head.get(4..8) == Some(b"ftyp") {
        // ISO/IEC 23008-12 and the AVIF specification: the major brand and those compatible.
        let length = head.get(..4).and_then(|length| length.try_into().ok()).map_or(0, u32::from_be_bytes) as usize;
        let brands = head.get(8..length.min(head.len())).unwrap_or_default();
        let has = |names: &[&[u8; 4]]| brands.chunks_exact(4).any(|brand| names.iter().any(|name| brand == *name));
        if has(&[b"avif", b"avis"]) {
            return Some("AVIF");
        }
        if has(&[b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1"]) {
            return Some("HEIC");
        }
        return None;
    }
    const STARTS: &[(&[u8], &str)] = &[
        (&[0xff, 0x0a], "JPEG XL"),
        (b"\0\0\0\x0cJXL ", "JPEG XL"),
        (b"\0\0\0\x0cjP  ", "JPEG 2000"),
        (&[0xff, 0x4f, 0xff, 0x51], "JPEG 2000"),
        (b"8BPS", "a Photoshop document"),
        (b"qoif", "QOI"),
        (b"DDS ", "a DDS texture"),
        (&[0x76, 0x2f, 0x31, 0x01], "OpenEXR"),
        (b"#?RADIANCE", "Radiance HDR"),
        (&[0, 0, 1, 0], "a Windows icon"),
        (&[0xd7, 0xcd, 0xc6, 0x9a], "a Windows metafile"),
        (b"P1\n", "a Netpbm image"),
        (b"P2\n", "a Netpbm image"),
        (b"P3\n", "a Netpbm image"),
        (b"P4\n", "a Netpbm image"),
        (b"P5\n", "a Netpbm image"),
        (b"P6\n", "a Netpbm image"),
        (b"<svg", "an SVG drawing"),
    ];
    STARTS.iter().find(|(start, _)| head.starts_with(start)).map(|(_, what)| *what)
}
