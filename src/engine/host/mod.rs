//! What runs on the CPU's cores in Rust, on slices that MLX arrays lend ([`ffi`](super::ffi)): a whole decoder's pass, and what of
//! Whisper's encoder MLX's CPU backend computes in one thread and one number at a time.
//!
//! **A row's numbers do not depend on the rows beside it, to the last bit.** Every product adds its terms in the order of its
//! inputs, in a lane of its own, whether 1 row is multiplied or 500 are; attention goes over a row's own tokens alone.
//!
//! Weights stay packed as they are stored ([`matrix`]). Work is split over the pool's threads by output columns, so that each
//! weight is read once, by one thread. Vector instructions are found at run time (`pulp`): AVX-512, AVX2 with FMA, or NEON.

mod attention;
mod elementwise;
mod matrix;
mod pack;
mod panel;
mod rotation;
mod simd;

pub use attention::{Attention, Seen};
pub use elementwise::{gelu_each, gelu_tanh_gated, silu_gated, softmax_rows};
pub use matrix::{HostMatrix, Stored, Write};
pub use pack::{Packed, norm_rows};
pub use rotation::{Angles, Rotation, RotationKind};
pub use simd::{each_row, install, wanted};
