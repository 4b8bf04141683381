//! Gemma 4's towers: what it sees and hears, as hidden states of its text model.

mod audio;
mod clipped;
mod conformer;
mod tower;
mod vision;

#[cfg(test)]
mod tower_test;
