//! What a model's files say, read without loading a weight.
