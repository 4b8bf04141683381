//! Tells people what happens.
