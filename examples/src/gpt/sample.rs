//! Text from a trained model.

use burn::prelude::*;

use super::loader::hash;
use super::model::Gpt;

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
        // A number of at least 0 and below 1, from the upper 53 bits.
        let at = (hash(seed, index as u64) >> 11) as f64 / (1u64 << 53) as f64;
        text.push(draw(&last, at));
    }
    let bytes: Vec<u8> = text.into_iter().map(|byte| byte as u8).collect();
    printable(&bytes)
}

/// The text of the bytes, with control characters replaced: a model that has learned little writes
/// any byte.
pub fn printable(bytes: &[u8]) -> String {
    let text = String::from_utf8_lossy(bytes);
    let is_harmful = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    text.replace(is_harmful, "\u{fffd}")
}

/// The token at which the cumulated softmax of the logits passes `at`, a number of at least 0 and
/// below 1.
pub fn draw(logits: &[f64], at: f64) -> i32 {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weight = |logit: &f64| ((logit - most) / TEMPERATURE).exp();
    let weights: Vec<f64> = logits.iter().map(weight).collect();
    let mut left = at * weights.iter().sum::<f64>();
    let passed = weights.iter().position(|weight| {
        left -= weight;
        left < 0.0
    });
    passed.unwrap_or(logits.len() - 1) as i32
}
