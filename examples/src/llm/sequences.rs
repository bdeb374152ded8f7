//! What a model reads: tokens, and which of them are of one document.

use burn::prelude::*;

use super::{LlmConfig, Rotation};

/// Sequences of tokens, each of one document or of several.
#[derive(Clone, Debug)]
pub struct Sequences<B: Backend> {
    /// `[batch, time]`
    pub tokens: Tensor<B, 2, Int>,
    /// For each sequence the places at which another document begins, ascending and above 0.
    /// Attention does not cross them, and positions begin there again.
    pub boundaries: Vec<Vec<usize>>,
}

impl<B: Backend> Sequences<B> {
    /// Sequences of one document each.
    pub fn whole(tokens: Tensor<B, 2, Int>) -> Self {
        let boundaries = vec![Vec::new(); tokens.dims()[0]];
        Self { tokens, boundaries }
    }

    /// The number of the document that each of the first `time` tokens of a sequence is in.
    fn documents(boundaries: &[usize], time: usize) -> Vec<usize> {
        let of = |token| boundaries.partition_point(|boundary| *boundary <= token);
        (0..time).map(of).collect()
    }

    /// The token that follows each token but the last, `ignored` where it begins another document.
    ///
    /// # Shapes
    ///
    /// - output: `[batch * (time - 1)]`
    pub(super) fn targets(&self, ignored: i64) -> Tensor<B, 1, Int> {
        let [batch, time] = self.tokens.dims();
        let targets = self.tokens.clone().slice_dim(1, 1..time);
        if self.boundaries.iter().all(Vec::is_empty) {
            return targets.flatten::<1>(0, 1);
        }
        let mut begins = vec![false; batch * (time - 1)];
        for (sequence, boundaries) in self.boundaries.iter().enumerate() {
            for boundary in boundaries {
                begins[sequence * (time - 1) + boundary - 1] = true;
            }
        }
        let data = TensorData::new(begins, [batch * (time - 1)]);
        let mask = Tensor::<B, 1, Bool>::from_data(data, &self.tokens.device());
        targets.flatten::<1>(0, 1).mask_fill(mask, ignored)
    }
}

/// What attention needs of a batch beside its features: the positions, and who may read whom.
#[derive(Clone, Debug)]
pub struct Layout<B: Backend> {
    /// By the position of each token in its document.
    pub(super) rotation: Rotation<B>,
    /// `[batch, 1, time, time]`: true where query and key are of different documents. `None` where
    /// every sequence is of one document.
    pub(super) other_documents: Option<Tensor<B, 4, Bool>>,
}

impl<B: Backend> Layout<B> {
    /// That of the first `time` tokens of the sequences.
    pub(super) fn new(
        config: &LlmConfig,
        boundaries: &[Vec<usize>],
        time: usize,
        device: &B::Device,
    ) -> Self {
        if boundaries
            .iter()
            .flatten()
            .all(|boundary| *boundary >= time)
        {
            let positions: Vec<_> = (0..time).collect();
            return Self {
                rotation: Rotation::new(config, &positions, time, device),
                other_documents: None,
            };
        }
        let mut positions = Vec::with_capacity(boundaries.len() * time);
        let mut documents = Vec::with_capacity(boundaries.len() * time);
        for boundaries in boundaries {
            let of_sequence = Sequences::<B>::documents(boundaries, time);
            let position = |(token, document): (usize, &usize)| match document.checked_sub(1) {
                Some(boundary) => token - boundaries[boundary],
                None => token,
            };
            positions.extend(of_sequence.iter().enumerate().map(position));
            documents.extend(of_sequence.iter().map(|document| *document as i32));
        }
        let batch = boundaries.len();
        let data = TensorData::new(documents, [batch, time]);
        let documents = Tensor::<B, 2, Int>::from_data(data, device);
        let of_query = documents.clone().reshape([batch, 1, time, 1]);
        let of_key = documents.reshape([batch, 1, 1, time]);
        let square = [batch, 1, time, time];
        Self {
            rotation: Rotation::new(config, &positions, time, device),
            other_documents: Some(of_query.expand(square).not_equal(of_key.expand(square))),
        }
    }
}
