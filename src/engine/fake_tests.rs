//! The fake engine: what it makes up, and what it refuses.

use super::*;

fn request(seed: u64, max_tokens: u32, stop_tokens: &[u32]) -> Request {
    Request {
        sequence: SequenceId(seed),
        prompt: b"a prompt".iter().map(|&byte| u32::from(byte)).collect(),
        max_tokens,
        stop_tokens: stop_tokens.into(),
        generation: Arc::default(),
        seed,
        window: None,
        media: Vec::new(),
        whole_spans: false,
    }
}

#[test]
fn the_byte_model_writes_words_that_end_now_and_then() {
    let model = FakeModel::bytes();
    let mut lengths = Vec::new();
    for seed in 0..400 {
        let (tokens, reason) = model.completion(&request(seed, 512, &[FakeModel::BYTES_STOP_TOKEN]));
        let text = match reason {
            FinishReason::Stop => &tokens[..tokens.len() - 1],
            FinishReason::Length => &tokens[..],
        };
        assert!(text.iter().all(|&token| token == 32 || (97..=122).contains(&token)), "{text:?}");
        lengths.push(tokens.len());
    }
    let mean = lengths.iter().sum::<usize>() / lengths.len();
    assert!((48..=80).contains(&mean), "one token in 64 is an end, and rows have {mean} tokens on average");
    lengths.sort_unstable();
    lengths.dedup();
    assert!(lengths.len() > 100, "lengths vary: {lengths:?}");
}

#[test]
fn a_history_is_the_prompt_the_seed_and_every_token() {
    let model = FakeModel::bytes();
    let tokens = |request: &Request| model.completion(request).0;
    let base = request(1, 32, &[]);
    assert_eq!(tokens(&base), tokens(&base.clone()));
    assert_ne!(tokens(&base), tokens(&request(2, 32, &[])), "another seed");
    let mut swapped = base.clone();
    swapped.prompt.swap(0, 2);
    assert_ne!(tokens(&base), tokens(&swapped), "the same tokens in another order");
    assert_eq!(tokens(&request(1, 8, &[])), tokens(&base)[..8], "max_tokens only cuts");
    let silent = FakeModel { alphabet: Vec::new(), stop_one_in: 0, ..FakeModel::bytes() };
    assert_eq!(silent.completion(&request(1, 3, &[])), (vec![0, 0, 0], FinishReason::Length));
}

#[test]
fn tokens_come_as_often_as_their_log_probabilities_say() {
    let model = FakeModel::bytes();
    let likeliest = model.likeliest();
    let whole: f64 = likeliest.iter().map(|token| f64::from(token.logprob).exp()).sum();
    assert!((whole - 1.0).abs() < 1e-6, "{whole}");
    assert!(likeliest.is_sorted_by(|a, b| a.logprob > b.logprob || (a.logprob == b.logprob && a.token_id < b.token_id)));
    let (mut seen, mut counts) = (0.0, BTreeMap::new());
    for seed in 0..40 {
        for token in model.completion(&request(seed, 1000, &[])).0 {
            *counts.entry(token).or_insert(0.0) += 1.0;
            seen += 1.0;
        }
    }
    assert!(counts.keys().all(|token| likeliest.iter().any(|other| other.token_id == *token)));
    for TokenLogprob { token_id, logprob } in likeliest {
        let expected: f64 = seen * f64::from(logprob).exp();
        let count: f64 = counts.get(&token_id).copied().unwrap_or(0.0);
        assert!((count - expected).abs() < 5.0 * expected.sqrt(), "{token_id}: {count} times, {expected} expected");
    }
    let silent = FakeModel { alphabet: Vec::new(), stop_one_in: 0, ..FakeModel::bytes() };
    assert_eq!(silent.likeliest(), [TokenLogprob { token_id: 0, logprob: 0.0 }]);
    let mute = FakeModel { stop_one_in: 1, ..FakeModel::bytes() };
    assert_eq!(mute.likeliest(), [TokenLogprob { token_id: FakeModel::BYTES_STOP_TOKEN, logprob: 0.0 }]);
}
