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
    /// For each sequence whether the loss has each of its tokens. `None` where it has all.
    pub counted: Option<Vec<Vec<bool>>>,
}

impl<B: Backend> Sequences<B> {
    /// Sequences of one document each.
    pub fn whole(tokens: Tensor<B, 2, Int>) -> Self {
        let boundaries = vec![Vec::new(); tokens.dims()[0]];
        Self {
            tokens,
            boundaries,
            counted: None,
        }
    }

    /// The number of the document that each of the first `time` tokens of a sequence is in.
    fn documents(boundaries: &[usize], time: usize) -> Vec<usize> {
        let of = |token| boundaries.partition_point(|boundary| *boundary <= token);
        (0..time).map(of).collect()
    }

    /// The token that follows each token but the last, `ignored` where it begins another document,
    /// or the loss does not have it.
    ///
    /// # Shapes
    ///
    /// - output: `[batch * (time - 1)]`
    pub(super) fn targets(&self, ignored: i64) -> Tensor<B, 1, Int> {
        let [batch, time] = self.tokens.dims();
        let targets = self.tokens.clone().slice_dim(1, 1..time);
        if self.counted.is_none() && self.boundaries.iter().all(Vec::is_empty) {
            return targets.flatten::<1>(0, 1);
        }
        let is_counted = |sequence: usize, place: usize| match &self.counted {
            Some(counted) => counted[sequence][place],
            None => true,
        };
        let mut is_ignored = Vec::with_capacity(batch * (time - 1));
        for (sequence, boundaries) in self.boundaries.iter().enumerate() {
            let of_place = |place| boundaries.contains(&place) || !is_counted(sequence, place);
            is_ignored.extend((1..time).map(of_place));
        }
        let data = TensorData::new(is_ignored, [batch * (time - 1)]);
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
