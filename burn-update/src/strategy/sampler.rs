//! Which items of the data a rank trains on in an epoch. Integers only.

use burn_decorator::split_mix;
use serde::{Deserialize, Serialize};

/// Which items each rank trains on in an epoch: PyTorch's `DistributedSampler`.
///
/// An epoch is one order of all items, a function of the seed and of the epoch's number, the same
/// at any number of ranks. Rank `r` of `n` takes the items at `r`, `r + n`, `r + 2 n` and so on. So
/// `n` ranks with batches of `b` items train in each step on the batch of `n b` items that one rank
/// would, and a training that is resumed continues the order, at the same or at another number of
/// ranks.
///
/// All ranks get equally many items: see [`Tail`].
///
/// ```
/// use burn_update::{DistributedSampler, EpochOfRank};
///
/// let sampler = DistributedSampler::shuffled(7);
/// let of_rank = |rank| sampler.items(6, EpochOfRank { epoch: 1, rank, ranks: 2 });
/// let one_rank = sampler.items(6, EpochOfRank { epoch: 1, rank: 0, ranks: 1 });
/// let taken_in_turn: Vec<_> = (0..6).map(|at| of_rank(at % 2)[at / 2]).collect();
/// assert_eq!(taken_in_turn, one_rank);
/// assert_ne!(sampler.items(6, EpochOfRank { epoch: 2, rank: 0, ranks: 1 }), one_rank);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DistributedSampler {
    order: Order,
    tail: Tail,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Order {
    /// Another permutation in each epoch.
    Shuffled { seed: u64 },
    /// As the items are.
    AsTheyAre,
}

/// What happens to the last items of an epoch if their number does not divide by that of the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Tail {
    /// The first items of the epoch's order are taken again, fewer than there are ranks, so that
    /// every item is trained on (PyTorch's `drop_last=False`).
    #[default]
    Repeat,
    /// The last items of the epoch's order, fewer than there are ranks, are left out. Others are in
    /// the next epoch (PyTorch's `drop_last=True`).
    Drop,
}

/// An epoch of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochOfRank {
    /// The epoch's number. Burn's begin with 1.
    pub epoch: usize,
    /// The rank's number, below that of the ranks.
    pub rank: usize,
    /// The number of ranks.
    pub ranks: usize,
}

impl DistributedSampler {
    /// Another permutation of the items in each epoch.
    pub fn shuffled(seed: u64) -> Self {
        Self {
            order: Order::Shuffled { seed },
            tail: Tail::default(),
        }
    }

    /// The items as they are, in each epoch.
    pub fn in_order() -> Self {
        Self {
            order: Order::AsTheyAre,
            tail: Tail::default(),
        }
    }

    /// Chooses what happens to the last items of an epoch.
    #[must_use]
    pub fn with_tail(self, tail: Tail) -> Self {
        Self { tail, ..self }
    }

    /// The number of a rank's items in an epoch of `items`.
    pub fn items_of_rank(&self, items: usize, ranks: usize) -> usize {
        match self.tail {
            Tail::Repeat => items.div_ceil(ranks),
            Tail::Drop => items / ranks,
        }
    }

    /// The positions of the rank's items among `items`, in the order of the epoch.
    pub fn items(&self, items: usize, of: EpochOfRank) -> Vec<usize> {
        let order = self.order.of_epoch(items, of.epoch);
        let own = 0..self.items_of_rank(items, of.ranks);
        own.map(|number| order[(number * of.ranks + of.rank) % items])
            .collect()
    }
}

impl Order {
    fn of_epoch(self, items: usize, epoch: usize) -> Vec<usize> {
        let mut order: Vec<_> = (0..items).collect();
        let Self::Shuffled { seed } = self else {
            return order;
        };
        // Fisher and Yates, from the last place to the first.
        let stream = split_mix::output(seed, epoch as u64);
        for place in (1..items).rev() {
            let choices = place as u128 + 1;
            let random = split_mix::output(stream, place as u64);
            let chosen = (u128::from(random) * choices) >> 64;
            order.swap(place, chosen as usize);
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// At any number of ranks, in each step, whatever the size of batches.
        #[test]
        fn ranks_together_read_what_one_rank_reads(
            seed: u64,
            epoch in 1_usize..5,
            items in 0_usize..60,
            ranks in 1_usize..6,
            size in 1_usize..5,
        ) {
            let sampler = DistributedSampler::shuffled(seed);
            let of = |rank, ranks| EpochOfRank { epoch, rank, ranks };
            let one = sampler.items(items, of(0, 1));
            let mut sorted = one.clone();
            sorted.sort_unstable();
            prop_assert_eq!(sorted, (0..items).collect::<Vec<_>>());
            for tail in [Tail::Repeat, Tail::Drop] {
                let sampler = sampler.with_tail(tail);
                let each: Vec<_> = (0..ranks).map(|rank| sampler.items(items, of(rank, ranks))).collect();
                let length = sampler.items_of_rank(items, ranks);
                prop_assert!(each.iter().all(|own| own.len() == length));
                // What is trained on in all: the order of one rank, with its beginning again, or
                // without its end.
                let total = length * ranks;
                prop_assert!(total.abs_diff(items) < ranks);
                let trained: Vec<_> = one.iter().cycle().take(total).copied().collect();
                for step in 0..length.div_ceil(size) {
                    let batch = |own: &Vec<usize>| own.chunks(size).nth(step).unwrap().to_vec();
                    let mut union: Vec<_> = each.iter().flat_map(batch).collect();
                    let mut expected = trained.chunks(size * ranks).nth(step).unwrap().to_vec();
                    union.sort_unstable();
                    expected.sort_unstable();
                    prop_assert_eq!(union, expected);
                }
            }
        }
    }

    #[test]
    fn an_order_is_a_function_of_seed_and_epoch() {
        let order = |seed, epoch| Order::Shuffled { seed }.of_epoch(100, epoch);
        assert_eq!(order(3, 2), order(3, 2));
        let others = [order(3, 1), order(3, 3), order(2, 2), (0..100).collect()];
        assert!(others.iter().all(|other| *other != order(3, 2)));
        // Of this version and every later one: a resumed training reads the data that it has not
        // read yet.
        assert_eq!(Order::Shuffled { seed: 0 }.of_epoch(8, 1), FIRST_OF_SEED_0);
        assert_eq!(Order::AsTheyAre.of_epoch(3, 7), [0, 1, 2]);
    }

    const FIRST_OF_SEED_0: [usize; 8] = [1, 5, 4, 0, 6, 3, 7, 2];
}
