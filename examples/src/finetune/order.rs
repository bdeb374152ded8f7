//! Which sequences an update reads.

use burn_zero::{DistributedSampler, EpochOfRank};

/// Updates whose sequences are sorted by length together. As transformers' `group_by_length` has
/// it: enough to have sequences of similar lengths in an update, and few of all in an epoch.
const SORTED_UPDATES: usize = 50;

/// The sequences of all updates, one epoch of them after the other: a function of the seed and of
/// their number from the start alone, however they fall into micro-batches and ranks.
#[derive(Clone, Debug)]
pub struct Order {
    sampler: DistributedSampler,
    /// Of each sequence. `[sequences]`
    lengths: Vec<usize>,
    /// Whether the sequences are permuted.
    is_shuffled: bool,
    /// Sequences in an update.
    update: usize,
    epoch: usize,
    /// Of the epoch. `[sequences]`
    of_epoch: Vec<usize>,
}

impl Order {
    /// Another permutation of the sequences in each epoch, or with no seed the sequences as they
    /// are, in updates of so many. Where the lengths differ, an update has sequences of similar
    /// lengths, and begins with the longest.
    pub fn new(lengths: Vec<usize>, update: usize, seed: Option<u64>) -> Self {
        let sampler = match seed {
            Some(seed) => DistributedSampler::shuffled(seed),
            None => DistributedSampler::in_order(),
        };
        let mut order = Self {
            sampler,
            lengths,
            is_shuffled: seed.is_some(),
            update,
            epoch: 0,
            of_epoch: Vec::new(),
        };
        order.enter(1);
        order
    }

    /// Epochs count from 1.
    fn enter(&mut self, epoch: usize) {
        if self.epoch == epoch {
            return;
        }
        let permuted = self.permuted(self.lengths.len(), epoch);
        let are_equal = self.lengths.iter().all(|length| *length == self.lengths[0]);
        self.of_epoch = if are_equal || !self.is_shuffled {
            permuted
        } else {
            self.by_length(permuted, epoch)
        };
        self.epoch = epoch;
    }

    fn permuted(&self, items: usize, epoch: usize) -> Vec<usize> {
        let whole = EpochOfRank {
            epoch,
            rank: 0,
            ranks: 1,
        };
        self.sampler.items(items, whole)
    }

    /// The sequences in groups of an update with similar lengths, the groups in a random order. What
    /// completes the last update of the epoch before comes first, and what begins an update that the
    /// next epoch completes comes last, so that every update between them is one group.
    fn by_length(&self, mut permuted: Vec<usize>, epoch: usize) -> Vec<usize> {
        let before = (epoch - 1) * self.lengths.len();
        let completing = before.next_multiple_of(self.update) - before;
        let (completing, own) = permuted.split_at_mut(completing.min(self.lengths.len()));
        for sorted in own.chunks_mut(SORTED_UPDATES * self.update) {
            sorted.sort_by_key(|sequence| self.lengths[*sequence]);
        }
        let groups = own.chunks_exact(self.update);
        let begun = groups.remainder();
        let groups: Vec<_> = groups.collect();
        let order = self.permuted(groups.len(), epoch);
        let groups = order.into_iter().map(|group| groups[group]);
        let groups = groups.flatten().copied();
        let completing = completing.iter().copied();
        completing
            .chain(groups)
            .chain(begun.iter().copied())
            .collect()
    }

    /// The sequences of an update, counted from 0, the longest first: so the first micro-batch
    /// takes the most memory, and each has sequences of similar lengths.
    pub fn update(&mut self, update: usize) -> Vec<usize> {
        let numbers = update * self.update..(update + 1) * self.update;
        let sequences = self.lengths.len();
        let sequence = |number| {
            self.enter(number / sequences + 1);
            self.of_epoch[number % sequences]
        };
        let mut of_update: Vec<_> = numbers.map(sequence).collect();
        of_update.sort_by_key(|sequence| std::cmp::Reverse(self.lengths[*sequence]));
        of_update
    }
}
