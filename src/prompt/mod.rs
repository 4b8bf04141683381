//! Items into token ids.
