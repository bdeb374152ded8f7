//! Text from a trained model.

use burn::prelude::*;

use super::model::Gpt;
use super::windows::hash;

/// The text that the sample continues.
const PROMPT: &str = "/// ";

/// Divides the logits: below 1 the likely bytes become likelier.
const TEMPERATURE: f64 = 0.7;

/// Writes `length` bytes, each drawn from the model's distribution of the next byte.
///
/// The same model and seed give the same text.
pub fn sample<B: Backend>(model: &Gpt<B>, length: usize, seed: u64, device: &B::Device) -> String {
    let mut text: Vec<i32> = PROMPT.bytes().map(i32::from).collect();
    for index in 0..length {
        let seen = &text[text.len().saturating_sub(model.context())..];
        let seen = TensorData::new(seen.to_vec(), [1, seen.len()]);
        let logits = model.forward(Tensor::from_data(seen, device));
        let [_, time, vocabulary] = logits.dims();
        let last = logits.slice([0..1, time - 1..time, 0..vocabulary]);
        let last: Vec<f64> = last.into_data().iter().collect();
        text.push(draw(&last, unit(hash(seed, index as u64))));
    }
    let bytes: Vec<u8> = text.into_iter().map(|byte| byte as u8).collect();
    printable(&bytes)
}

/// The text of the bytes, with control characters replaced: a model that has learned little writes any byte.
fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let harmless = |c: char| !c.is_control() || matches!(c, '\n' | '\t');
    text.chars()
        .map(|c| {
            if harmless(c) {
                c
            } else {
                char::REPLACEMENT_CHARACTER
            }
        })
        .collect()
}

/// The token at which the cumulated softmax of the logits passes `at`, a number of at least 0 and below 1.
fn draw(logits: &[f64], at: f64) -> i32 {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits
        .iter()
        .map(|logit| ((logit - most) / TEMPERATURE).exp())
        .collect();
    let mut left = at * weights.iter().sum::<f64>();
    let passed = weights.iter().position(|weight| {
        left -= weight;
        left < 0.0
    });
    passed.unwrap_or(logits.len() - 1) as i32
}

/// A number of at least 0 and below 1, from the upper 53 bits.
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::model::GptConfig;
    use burn_flex::Flex;

    #[test]
    fn control_characters_are_not_printed() {
        assert_eq!(printable(b"a\tb\n\x1b[2J\0"), "a\tb\n\u{fffd}[2J\u{fffd}");
    }

    #[test]
    fn draws_by_weight() {
        let logits = [f64::NEG_INFINITY, 0.0, f64::NEG_INFINITY, 0.0];
        assert_eq!(draw(&logits, 0.0), 1);
        assert_eq!(draw(&logits, 0.49), 1);
        assert_eq!(draw(&logits, 0.51), 3);
        assert_eq!(draw(&logits, unit(u64::MAX)), 3);
    }

    #[test]
    fn is_longer_than_the_context_and_a_function_of_the_seed() {
        let device = Default::default();
        let model = GptConfig::new(8, 1, 2, 8).init::<Flex>(&device);
        let text = sample(&model, 20, 1, &device);
        assert!(text.starts_with(PROMPT));
        assert_eq!(text, sample(&model, 20, 1, &device));
        assert_ne!(text, sample(&model, 20, 2, &device));
    }
}
