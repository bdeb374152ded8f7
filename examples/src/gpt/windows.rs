//! Which sequences of the text an epoch reads.

use std::ops::Range;

use super::plan::Plan;

/// Sequences of a text, numbered.
///
/// Every sequence is a pure function of its number, so any thread can cut any of them, in any order, in this run or in
/// one that is resumed.
#[derive(Clone, Debug)]
pub struct Windows {
    text: Vec<u8>,
    context: usize,
    batches: Batches,
    order: Order,
}

/// How sequences fall into batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batches {
    /// Sequences in a batch of one rank.
    pub size: usize,
    /// Batches of one rank in an update.
    pub accum: usize,
    /// Ranks.
    pub ranks: usize,
}

impl Batches {
    /// Sequences in an update.
    fn update(self) -> usize {
        self.size * self.accum * self.ranks
    }
}

/// The positions of the windows in the text.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Anywhere; each step of the plan reads new ones.
    Random {
        seed: u64,
        plan: Plan,
        step_items: usize,
    },
    /// Evenly spread, the same in every epoch.
    Spread { count: usize },
}

/// Sequences of bytes and, for each byte, the one that follows it; both row by row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rows {
    /// What the model reads.
    pub inputs: Vec<i32>,
    /// The bytes that it should predict.
    pub targets: Vec<i32>,
    /// Number of sequences.
    pub rows: usize,
}

impl Windows {
    /// Random windows for training: an update's batches for each step of the plan. Which windows a step reads depends on their
    /// number alone, however it falls into batches and ranks.
    ///
    /// Sequences are numbered rank by rank: each rank has an equal part of the numbers of the longest epoch. The batches of an epoch are
    /// assigned to the ranks in turn.
    ///
    /// # Panics
    ///
    /// If the text does not hold one window and the byte after it.
    pub fn random(text: Vec<u8>, context: usize, batches: Batches, seed: u64, plan: Plan) -> Self {
        let order = Order::Random {
            seed,
            plan,
            step_items: batches.update(),
        };
        Self::new(text, context, batches, order)
    }

    /// At most `most` windows spread over the whole text, for validation: side by side where the text is short.
    ///
    /// Their number is a multiple of an update's where there are enough of them, so that the mean over batches is the mean over
    /// bytes, and depends on that number alone.
    ///
    /// # Panics
    ///
    /// If the text does not hold one window and the byte after it.
    pub fn spread(text: Vec<u8>, context: usize, batches: Batches, most: usize) -> Self {
        let (update, batch) = (batches.update(), batches.size);
        let there = (text.len() - 1) / context;
        let count = there.min(most.max(update));
        let count = match count {
            enough if enough >= update => enough - enough % update,
            few if few >= batch => few - few % batch,
            few => few,
        };
        Self::new(text, context, batches, Order::Spread { count })
    }

    fn new(text: Vec<u8>, context: usize, batches: Batches, order: Order) -> Self {
        assert!(text.len() > context, "the text holds one window");
        Self {
            text,
            context,
            batches,
            order,
        }
    }

    /// Bytes in a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Sequences in a full batch.
    pub fn batch(&self) -> usize {
        self.batches.size
    }

    /// Number of sequences of the longest epoch.
    pub fn most_items(&self) -> usize {
        match self.order {
            Order::Random {
                plan, step_items, ..
            } => plan.longest() * step_items,
            Order::Spread { count } => count,
        }
    }

    /// The sequences of an epoch among these numbers: an epoch shorter than the longest lacks the last ones of each rank.
    pub fn items(&self, epoch: usize, numbers: Range<usize>) -> Vec<usize> {
        let Order::Random {
            plan, step_items, ..
        } = self.order
        else {
            return numbers.collect();
        };
        let Batches { size, ranks, .. } = self.batches;
        let of_rank = |steps: usize| steps * step_items / ranks;
        let (most, there) = (of_rank(plan.longest()), of_rank(plan.steps_of(epoch).len()));
        let dealt = |number: usize| {
            let (rank, own) = (number / most, number % most);
            let dealt = || (own / size * ranks + rank) * size + own % size;
            (own < there).then(dealt)
        };
        numbers.filter_map(dealt).collect()
    }

    /// The rank that reads this number.
    pub fn rank_of(&self, number: usize) -> usize {
        number / (self.most_items() / self.batches.ranks).max(1)
    }

    /// The seed of a rank's random numbers in an epoch's steps; `None` where no step draws any.
    pub fn epoch_seed(&self, rank: usize, epoch: usize) -> Option<u64> {
        match self.order {
            Order::Random { seed, plan, .. } => {
                let start = plan.steps_of(epoch).start as u64;
                Some(hash(!seed ^ ((rank as u64) << 32), start))
            }
            Order::Spread { .. } => None,
        }
    }

    /// Cuts these sequences of an epoch.
    pub fn cut(&self, epoch: usize, items: &[usize]) -> Rows {
        let mut rows = Rows {
            inputs: Vec::with_capacity(items.len() * self.context),
            targets: Vec::with_capacity(items.len() * self.context),
            rows: items.len(),
        };
        for &item in items {
            let start = self.start(epoch, item);
            let window = &self.text[start..=start + self.context];
            let widen = |bytes: &[u8]| bytes.iter().copied().map(i32::from).collect::<Vec<_>>();
            rows.inputs.extend(widen(&window[..self.context]));
            rows.targets.extend(widen(&window[1..]));
        }
        rows
    }

    fn start(&self, epoch: usize, item: usize) -> usize {
        let last = self.text.len() - self.context - 1;
        match self.order {
            Order::Random {
                seed,
                plan,
                step_items,
            } => {
                // Numbered from the start of the training, so that they do not depend on the epochs.
                let number = plan.steps_of(epoch).start * step_items + item;
                (hash(seed, number as u64) % (last as u64 + 1)) as usize
            }
            Order::Spread { count } => item * last / count.saturating_sub(1).max(1),
        }
    }
}

/// The `index`-th output of SplitMix64 (Steele, Lea and Flood 2014) from this seed, without those before it.
pub(crate) fn hash(seed: u64, index: u64) -> u64 {
    let z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(length: usize) -> Vec<u8> {
        (0..length).map(|i| (i % 256) as u8).collect()
    }

    fn one_rank(size: usize, accum: usize) -> Batches {
        Batches {
            size,
            accum,
            ranks: 1,
        }
    }

    fn upto(end: usize) -> Vec<usize> {
        (0..end).collect()
    }

    #[test]
    fn hash_is_splitmix64() {
        // The reference implementation's first outputs for seed 1234567.
        assert_eq!(hash(1_234_567, 0), 6_457_827_717_110_365_317);
        assert_eq!(hash(1_234_567, 1), 3_203_168_211_198_807_973);
    }

    #[test]
    fn targets_are_the_inputs_one_byte_on() {
        let windows = Windows::random(text(256), 5, one_rank(4, 1), 1, Plan::new(3, 3));
        let rows = windows.cut(1, &upto(4));
        assert_eq!((rows.rows, rows.inputs.len()), (4, 20));
        for (input, target) in rows.inputs.iter().zip(&rows.targets) {
            assert_eq!(input + 1, *target);
        }
    }

    #[test]
    fn random_windows_depend_neither_on_epochs_nor_on_accumulation() {
        let whole =
            Windows::random(text(999), 5, one_rank(4, 1), 1, Plan::new(12, 12)).cut(1, &upto(48));
        let windows = Windows::random(text(999), 5, one_rank(2, 2), 1, Plan::new(12, 5));
        let parts: Vec<_> = (1..=3)
            .flat_map(|epoch| {
                let items = windows.items(epoch, 0..windows.most_items());
                windows.cut(epoch, &items).inputs
            })
            .collect();
        assert_eq!(parts, whole.inputs);
        let other =
            Windows::random(text(999), 5, one_rank(4, 1), 2, Plan::new(12, 12)).cut(1, &upto(48));
        assert_ne!(other, whole);
    }

    #[test]
    fn random_windows_reach_both_ends() {
        let windows = Windows::random(text(10), 5, one_rank(100, 1), 1, Plan::new(1, 1));
        let mut starts: Vec<_> = (0..100).map(|item| windows.start(1, item)).collect();
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn spread_windows_cover_the_text_once() {
        let windows = Windows::spread(text(101), 10, one_rank(5, 1), 100);
        assert_eq!(windows.most_items(), 10);
        let starts: Vec<_> = (0..10).map(|item| windows.start(7, item)).collect();
        assert_eq!(starts, [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]);
        assert_eq!(
            Windows::spread(text(101), 10, one_rank(5, 1), 8).most_items(),
            5
        );
        assert_eq!(
            Windows::spread(text(101), 10, one_rank(2, 3), 8).most_items(),
            6
        );
        assert_eq!(
            Windows::spread(text(101), 10, one_rank(4, 5), 8).most_items(),
            8
        );
        assert_eq!(
            Windows::spread(text(101), 10, one_rank(50, 1), 8).most_items(),
            10
        );
        assert_eq!(
            Windows::spread(text(11), 10, one_rank(5, 1), 8).most_items(),
            1
        );
    }
    #[test]
    fn ranks_read_the_parts_of_one_large_batch() {
        let plan = Plan::new(5, 3);
        let whole = Windows::random(text(999), 5, one_rank(6, 2), 1, plan);
        let batches = Batches {
            size: 2,
            accum: 2,
            ranks: 3,
        };
        let parts = Windows::random(text(999), 5, batches, 1, plan);
        assert_eq!(parts.most_items(), whole.most_items());
        let part = parts.most_items() / 3;
        // The first epoch has two steps, the second three.
        for (epoch, steps) in [(1, 2), (2, 3)] {
            let of_ranks = [0, 1, 2].map(|rank| {
                assert_eq!(parts.rank_of(rank * part), rank);
                parts.items(epoch, rank * part..(rank + 1) * part)
            });
            for batch in 0..steps * 2 {
                let read = of_ranks
                    .iter()
                    .flat_map(|items| parts.cut(epoch, &items[batch * 2..batch * 2 + 2]).inputs);
                let items = whole.items(epoch, batch * 6..batch * 6 + 6);
                assert_eq!(read.collect::<Vec<_>>(), whole.cut(epoch, &items).inputs);
            }
            assert!(of_ranks.iter().all(|items| items.len() == steps * 4));
        }
        assert_eq!(parts.epoch_seed(0, 1), whole.epoch_seed(0, 1));
        assert_ne!(parts.epoch_seed(1, 1), parts.epoch_seed(0, 1));
    }
}
