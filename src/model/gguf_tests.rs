//! A named test for each hostile header, and headers of random bytes.

use proptest::prelude::*;

use super::*;

/// Builds headers byte by byte, right or wrong.
#[derive(Default, Clone)]
pub(crate) struct Header(pub Vec<u8>);

impl Header {
    pub fn start(tensors: u64, metadata: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(3).u64(tensors).u64(metadata)
    }

    pub fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    pub fn string(self, text: &str) -> Self {
        self.u64(text.len() as u64).bytes(text.as_bytes())
    }

    pub fn tensor(self, name: &str, shape: &[u64], kind: u32, offset: u64) -> Self {
        let start = self.string(name).u32(shape.len() as u32);
        shape.iter().fold(start, |header, &size| header.u64(size)).u32(kind).u64(offset)
    }

    /// Pads to 32 and adds `bytes` of data.
    pub fn data(mut self, bytes: usize) -> Self {
        let start = self.0.len().next_multiple_of(32);
        self.0.resize(start + bytes, 0);
        self
    }

    fn read(&self) -> Result<Gguf, GgufError> {
        Gguf::read(&self.0[..], self.0.len() as u64, Path::new("model.gguf"))
    }
}

#[track_caller]
fn refused(header: Header, expected: &str) {
    let message = header.read().unwrap_err().to_string();
    assert!(message.contains(expected), "{message:?} does not say {expected:?}");
    assert!(message.contains("model.gguf"), "{message:?} does not name the file");
}

fn good() -> Header {
    Header::start(1, 3)
        .string("general.architecture")
        .u32(8)
        .string("llama")
        .string("llama.block_count")
        .u32(4)
        .u32(2)
        .string("tokenizer.ggml.tokens")
        .u32(9)
        .u32(8)
        .u64(2)
        .string("a")
        .string("ö")
        .tensor("token_embd.weight", &[64, 2], 2, 0)
        .data(72)
}

#[test]
fn a_good_header_is_read() {
    let gguf = good().read().unwrap();
    assert_eq!(gguf.string("general.architecture"), Some("llama"));
    assert_eq!(gguf.unsigned("llama.block_count"), Some(2));
    assert_eq!(gguf.strings("tokenizer.ggml.tokens").unwrap(), ["a", "ö"]);
    let tensor = gguf.tensor("token_embd.weight").unwrap();
    // ggml stores the fastest dimension first: 2 rows of 64.
    assert_eq!((tensor.shape.as_slice(), tensor.kind.name, tensor.bytes), (&[2, 64][..], "Q4_0", 72));
    assert_eq!(gguf.data_offset % 32, 0);
}

#[test]
fn every_cut_of_a_good_header_is_refused() {
    let whole = good();
    for length in 0..whole.0.len() {
        assert!(Header(whole.0[..length].to_vec()).read().is_err(), "cut to {length} bytes");
    }
}

#[test]
fn another_magic() {
    refused(Header(b"PK\x03\x04".to_vec()), "not a GGUF file");
}

#[test]
fn version_1_and_big_endian() {
    refused(Header(b"GGUF".to_vec()).u32(1), "version 1");
    refused(Header(b"GGUF".to_vec()).u32(3u32.swap_bytes()), "version 50331648");
}

#[test]
fn more_metadata_than_bytes() {
    refused(Header::start(0, u64::MAX), "metadata entries");
}

#[test]
fn more_tensors_than_bytes() {
    refused(Header::start(u64::MAX / 2, 0), "tensors");
}

#[test]
fn a_key_longer_than_the_file() {
    refused(Header::start(0, 1).u64(1 << 60).bytes(&[b'a'; 32]), "a metadata key claims");
}

#[test]
fn a_string_longer_than_the_file() {
    refused(Header::start(0, 1).string("k").u32(8).u64(u64::MAX).bytes(&[b'a'; 32]), "claims 18446744073709551615 bytes");
}

#[test]
fn an_array_longer_than_the_file() {
    refused(Header::start(0, 1).string("k").u32(9).u32(12).u64(1 << 61).bytes(&[0; 64]), "elements of \"k\"");
}

#[test]
fn arrays_too_deep() {
    let deep = (0..40).fold(Header::start(0, 1).string("k").u32(9), |header, _| header.u32(9).u64(1));
    refused(deep.bytes(&[0; 64]), "deep");
}

#[test]
fn an_unknown_value_type() {
    refused(Header::start(0, 1).string("k").u32(13).bytes(&[0; 8]), "unknown value type 13");
}

#[test]
fn a_boolean_of_2() {
    refused(Header::start(0, 1).string("k").u32(7).bytes(&[2]), "boolean 2");
}

#[test]
fn a_key_that_is_not_utf8() {
    refused(Header::start(0, 1).u64(2).bytes(&[0xff, 0xfe]).u32(4).u32(1), "not UTF-8");
}

#[test]
fn a_key_there_twice() {
    refused(Header::start(0, 2).string("k").u32(4).u32(1).string("k").u32(4).u32(2), "there twice");
}

#[test]
fn a_tensor_there_twice() {
    refused(Header::start(2, 0).tensor("t", &[1], 0, 0).tensor("t", &[1], 0, 0).data(64), "there twice");
}

#[test]
fn a_tensor_of_too_many_dimensions() {
    refused(Header::start(1, 0).string("t").u32(1 << 30).bytes(&[0; 64]), "dimensions");
}

#[test]
fn a_tensor_whose_size_overflows() {
    refused(Header::start(1, 0).tensor("t", &[1 << 40, 1 << 40], 0, 0).data(64), "impossible shape");
}

#[test]
fn a_tensor_of_half_a_block() {
    refused(Header::start(1, 0).tensor("t", &[16, 2], 2, 0).data(64), "impossible shape");
}

#[test]
fn a_tensor_of_unknown_type() {
    refused(Header::start(1, 0).tensor("t", &[1], 999, 0).data(64), "unknown type 999");
}

#[test]
fn a_tensor_past_the_end() {
    refused(Header::start(1, 0).tensor("t", &[64], 0, 0).data(64), "past the end");
    refused(Header::start(1, 0).tensor("t", &[1], 0, u64::MAX - 31).data(64), "past the end");
}

#[test]
fn a_tensor_off_its_alignment() {
    refused(Header::start(1, 0).tensor("t", &[1], 0, 8).data(64), "not a multiple of 32");
}

#[test]
fn an_alignment_of_zero() {
    refused(Header::start(0, 1).string("general.alignment").u32(4).u32(0), "general.alignment");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let mut header = Header::start(3, 3).0;
        header.extend(bytes);
        let _ = Header(header).read();
    }

    #[test]
    fn one_changed_byte_never_panics(at in 0usize..200, value in any::<u8>()) {
        let mut header = good();
        let at = at % header.0.len();
        header.0[at] = value;
        let _ = header.read();
    }
}
