//! Images, from files to what a vision tower sees: plain buffers, no tensor.
//!
//! `content` says by its first bytes what a file is, `decode` makes a [`Picture`] of it, `resize` scales one exactly as Pillow
//! does, [`PatchRule`] cuts it into [`Patches`].

mod content;
mod decode;
mod error;
#[cfg(test)]
mod golden_tests;
mod patches;
mod resize;
#[cfg(test)]
mod tests;

pub use content::is_image_name;
pub use decode::{BYTES_MAX, PIXELS_MAX, Picture};
pub use error::ImageError;
pub use patches::{PatchRule, Patches};
