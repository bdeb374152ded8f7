//! Which sequences an update reads.

use burn_zero::{DistributedSampler, EpochOfRank};

/// The sequences of all updates, one epoch of them after the other: a function of the seed and of
/// their number from the start alone, however they fall into micro-batches and ranks.
#[derive(Clone, Debug)]
pub struct Order {
    sampler: DistributedSampler,
    sequences: usize,
    epoch: usize,
    /// Of the epoch. `[sequences]`
    of_epoch: Vec<usize>,
}

impl Order {
    /// Another permutation of so many sequences in each epoch, or with no seed the sequences as
    /// they are.
    pub fn new(sequences: usize, seed: Option<u64>) -> Self {
        let sampler = match seed {
            Some(seed) => DistributedSampler::shuffled(seed),
            None => DistributedSampler::in_order(),
        };
        let mut order = Self {
            sampler,
            sequences,
            epoch: 0,
            of_epoch: Vec::new(),
        };
        order.enter(1);
        order
    }

    /// Epochs count from 1.
    fn enter(&mut self, epoch: usize) {
        if self.epoch != epoch {
            let whole = EpochOfRank {
                epoch,
                rank: 0,
                ranks: 1,
            };
            self.of_epoch = self.sampler.items(self.sequences, whole);
            self.epoch = epoch;
        }
    }

    /// The sequences of an update, counted from 0, of `size` sequences.
    pub fn update(&mut self, update: usize, size: usize) -> Vec<usize> {
        let numbers = update * size..(update + 1) * size;
        let sequence = |number| {
            self.enter(number / self.sequences + 1);
            self.of_epoch[number % self.sequences]
        };
        numbers.map(sequence).collect()
    }
}
