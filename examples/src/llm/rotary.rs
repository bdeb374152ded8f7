//! The rotary embedding (Su et al., arXiv 2104.09864), as Hugging Face's files have it: feature `i`
//! of a head is rotated together with feature `i + half`.

use std::f64::consts::TAU;

use burn::prelude::*;
use burn::tensor::DType;

use super::{LlmConfig, RotaryScaling};

/// The angles by which queries and keys of some positions are rotated.
#[derive(Clone, Debug)]
pub struct Rotation<B: Backend> {
    /// `[sequences, 1, time, features / 2]`, f32
    cos: Tensor<B, 4>,
    /// `[sequences, 1, time, features / 2]`, f32
    sin: Tensor<B, 4>,
}

impl<B: Backend> Rotation<B> {
    /// That of these positions in each of some sequences, one after the other. One sequence stands
    /// for all of a batch.
    pub fn new(config: &LlmConfig, positions: &[usize], time: usize, device: &B::Device) -> Self {
        let frequencies = frequencies(config);
        let half = frequencies.len();
        let angle = |position: &usize| {
            let position = *position as f64;
            frequencies
                .iter()
                .map(move |frequency| position * frequency)
        };
        let angles: Vec<f64> = positions.iter().flat_map(angle).collect();
        let table = |of: fn(f64) -> f64| {
            let values: Vec<f32> = angles.iter().map(|angle| of(*angle) as f32).collect();
            let data = TensorData::new(values, [positions.len() / time, 1, time, half]);
            Tensor::from_data(data, (device, DType::F32))
        };
        Self {
            cos: table(f64::cos),
            sin: table(f64::sin),
        }
    }

    /// # Shapes
    ///
    /// - x, output: `[batch, heads, time, features]`, in the type of `x`
    pub fn rotate(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let dtype = x.dtype();
        let half = x.dims()[3] / 2;
        let [first, second] = [0..half, half..2 * half].map(|range| x.clone().slice_dim(3, range));
        let (cos, sin) = (self.cos.clone().cast(dtype), self.sin.clone().cast(dtype));
        let rotated_first = first.clone() * cos.clone() - second.clone() * sin.clone();
        let rotated_second = second * cos + first * sin;
        Tensor::cat(vec![rotated_first, rotated_second], 3)
    }
}

/// Radians a position, for each pair of features.
fn frequencies(config: &LlmConfig) -> Vec<f64> {
    let width = config.head_width;
    let frequency = |pair: usize| {
        let exponent = 2.0 * pair as f64 / width as f64;
        config.rotary_base.powf(-exponent)
    };
    let scaled = |frequency: f64| match config.rotary_scaling {
        RotaryScaling::None => frequency,
        RotaryScaling::Linear { factor } => frequency / factor,
        RotaryScaling::Llama3 {
            factor,
            low_frequency_factor,
            high_frequency_factor,
            original_context,
        } => {
            let turns = original_context * frequency / TAU;
            let share =
                (turns - low_frequency_factor) / (high_frequency_factor - low_frequency_factor);
            let share = share.clamp(0.0, 1.0);
            frequency * (share + (1.0 - share) / factor)
        }
    };
    (0..width / 2).map(frequency).map(scaled).collect()
}
