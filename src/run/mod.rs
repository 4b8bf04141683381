//! The one loop where the stages meet, and the other commands.

pub mod summary;
