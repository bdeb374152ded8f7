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
    batch: usize,
    order: Order,
}

/// Where the windows lie.
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
    /// What it should say.
    pub targets: Vec<i32>,
    /// Number of sequences.
    pub rows: usize,
}

impl Windows {
    /// Random windows for training: `accum` batches for each step of the plan. Which windows a step reads depends on the
    /// product of `batch` and `accum` alone.
    ///
    /// # Panics
    ///
    /// If the text does not hold one window and the byte after it.
    pub fn random(
        text: Vec<u8>,
        context: usize,
        [batch, accum]: [usize; 2],
        seed: u64,
        plan: Plan,
    ) -> Self {
        let order = Order::Random {
            seed,
            plan,
            step_items: batch * accum,
        };
        Self::new(text, context, batch, order)
    }

    /// At most `most` windows spread over the whole text, for validation: side by side where the text is short.
    ///
    /// Their number is a multiple of `batch` times `accum` where there are enough of them, so that the mean over batches is
    /// the mean over bytes, and depends on that product alone.
    ///
    /// # Panics
    ///
    /// If the text does not hold one window and the byte after it.
    pub fn spread(text: Vec<u8>, context: usize, [batch, accum]: [usize; 2], most: usize) -> Self {
        let step_items = batch * accum;
        let there = (text.len() - 1) / context;
        let count = there.min(most.max(step_items));
        let count = match count {
            enough if enough >= step_items => enough - enough % step_items,
            few if few >= batch => few - few % batch,
            few => few,
        };
        Self::new(text, context, batch, Order::Spread { count })
    }

    fn new(text: Vec<u8>, context: usize, batch: usize, order: Order) -> Self {
        assert!(text.len() > context, "the text holds one window");
        Self {
            text,
            context,
            batch,
            order,
        }
    }

    /// Bytes in a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Sequences in a full batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Number of sequences of an epoch.
    pub fn items(&self, epoch: usize) -> usize {
        match self.order {
            Order::Random {
                plan, step_items, ..
            } => plan.steps_of(epoch).len() * step_items,
            Order::Spread { count } => count,
        }
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

    /// What seeds the random numbers of an epoch's steps; nothing where no step draws any.
    pub fn epoch_seed(&self, epoch: usize) -> Option<u64> {
        match self.order {
            Order::Random { seed, plan, .. } => {
                Some(hash(!seed, plan.steps_of(epoch).start as u64))
            }
            Order::Spread { .. } => None,
        }
    }

    /// Cuts these sequences of an epoch.
    pub fn cut(&self, epoch: usize, items: Range<usize>) -> Rows {
        let mut rows = Rows {
            inputs: Vec::with_capacity(items.len() * self.context),
            targets: Vec::with_capacity(items.len() * self.context),
            rows: items.len(),
        };
        for item in items {
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
                // Numbered from the start of the training: how the steps fall into epochs does not change them.
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

    #[test]
    fn hash_is_splitmix64() {
        // The reference implementation's first outputs for seed 1234567.
        assert_eq!(hash(1_234_567, 0), 6_457_827_717_110_365_317);
        assert_eq!(hash(1_234_567, 1), 3_203_168_211_198_807_973);
    }

    #[test]
    fn targets_are_the_inputs_one_byte_on() {
        let windows = Windows::random(text(256), 5, [4, 1], 1, Plan::new(3, 3));
        let rows = windows.cut(1, 0..4);
        assert_eq!((rows.rows, rows.inputs.len()), (4, 20));
        for (input, target) in rows.inputs.iter().zip(&rows.targets) {
            assert_eq!(input + 1, *target);
        }
    }

    #[test]
    fn random_windows_depend_neither_on_epochs_nor_on_accumulation() {
        let whole = Windows::random(text(999), 5, [4, 1], 1, Plan::new(12, 12)).cut(1, 0..48);
        let windows = Windows::random(text(999), 5, [2, 2], 1, Plan::new(12, 5));
        let parts: Vec<_> = (1..=3)
            .flat_map(|epoch| windows.cut(epoch, 0..windows.items(epoch)).inputs)
            .collect();
        assert_eq!(parts, whole.inputs);
        let other = Windows::random(text(999), 5, [4, 1], 2, Plan::new(12, 12)).cut(1, 0..48);
        assert_ne!(other, whole);
    }

    #[test]
    fn random_windows_reach_both_ends() {
        let windows = Windows::random(text(10), 5, [100, 1], 1, Plan::new(1, 1));
        let mut starts: Vec<_> = (0..100).map(|item| windows.start(1, item)).collect();
        starts.sort_unstable();
        starts.dedup();
        assert_eq!(starts, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn spread_windows_cover_the_text_once() {
        let windows = Windows::spread(text(101), 10, [5, 1], 100);
        assert_eq!(windows.items(7), 10);
        let starts: Vec<_> = (0..10).map(|item| windows.start(7, item)).collect();
        assert_eq!(starts, [0, 10, 20, 30, 40, 50, 60, 70, 80, 90]);
        assert_eq!(Windows::spread(text(101), 10, [5, 1], 8).items(1), 5);
        assert_eq!(Windows::spread(text(101), 10, [2, 3], 8).items(1), 6);
        assert_eq!(Windows::spread(text(101), 10, [4, 5], 8).items(1), 8);
        assert_eq!(Windows::spread(text(101), 10, [50, 1], 8).items(1), 10);
        assert_eq!(Windows::spread(text(11), 10, [5, 1], 8).items(1), 1);
    }
}
