//! Batches of the text, and which of its sequences an epoch reads.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::prelude::*;
pub use burn_decorator::split_mix::output as hash;
use burn_update::{EpochOfRank, RankLoader};
use burn_zero::BatchSizes;

/// Sequences of tokens and, for each of them, the token that follows.
#[derive(Clone, Debug)]
pub struct TokenBatch<B: Backend> {
    /// What the model reads, `[batch, time]`.
    pub inputs: Tensor<B, 2, Int>,
    /// The tokens that it should predict, `[batch, time]`.
    pub targets: Tensor<B, 2, Int>,
}

/// How the updates of a training fall into epochs: a validation and a record follow each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Updates of the training.
    pub steps: usize,
    /// Updates of an epoch; the last one may be shorter.
    pub epoch: usize,
}

impl Plan {
    /// Number of epochs.
    pub fn epochs(&self) -> usize {
        self.steps.div_ceil(self.epoch)
    }

    /// The updates of an epoch; epochs count from 1, as Burn's do.
    pub fn updates_of(&self, epoch: usize) -> Range<usize> {
        let end = |epoch: usize| (epoch * self.epoch).min(self.steps);
        end(epoch - 1)..end(epoch)
    }
}

/// Cuts sequences out of the text: an item is the position at which one begins.
#[derive(Clone)]
pub struct Cut {
    text: Arc<[u8]>,
    context: usize,
}

impl Cut {
    /// The text holds more bytes than the context.
    pub fn new(text: &[u8], context: usize) -> Self {
        let text = text.into();
        Self { text, context }
    }

    /// The last position.
    fn last(&self) -> usize {
        self.text.len() - self.context - 1
    }

    /// At most `most` positions evenly spread over the whole text, for validation.
    ///
    /// Their number is a multiple of an update's where there are enough of them, so that the mean
    /// over batches is the mean over bytes, and depends on that number alone.
    pub fn spread(&self, batch: &BatchSizes, most: usize) -> Vec<usize> {
        let (size, update) = (batch.micro as usize, batch.train as usize);
        let count = (self.last() / self.context + 1).min(most.max(update));
        let whole = |size: usize| (count >= size).then_some(count - count % size);
        let count = whole(update).or(whole(size)).unwrap_or(count);
        let position = |item| item * self.last() / (count - 1).max(1);
        (0..count).map(position).collect()
    }
}

impl<B: Backend> Batcher<B, usize, TokenBatch<B>> for Cut {
    fn batch(&self, starts: Vec<usize>, device: &B::Device) -> TokenBatch<B> {
        let tokens = |shift: usize| {
            let sequence = |start: &usize| &self.text[start + shift..][..self.context];
            let bytes = starts.iter().flat_map(sequence);
            let tokens: Vec<i32> = bytes.map(|byte| i32::from(*byte)).collect();
            Tensor::from_data(
                TensorData::new(tokens, [starts.len(), self.context]),
                device,
            )
        };
        TokenBatch {
            inputs: tokens(0),
            targets: tokens(1),
        }
    }
}

/// Loads random sequences for training, one epoch after the other: each [`iter`](DataLoader::iter)
/// is the next one.
///
/// Which sequences an update reads depends on the seed and on their number from the start of the
/// training alone, however they fall into epochs, micro-batches and ranks. Each rank has an equal
/// part of the items of an epoch. The micro-batches of an update are assigned to the ranks in turn.
pub struct Loader<B: Backend> {
    cut: Cut,
    batch: BatchSizes,
    plan: Plan,
    seed: u64,
    /// The items of an epoch, which a [slice](DataLoader::slice) reduces.
    items: Range<usize>,
    next_epoch: AtomicUsize,
    device: B::Device,
}

impl<B: Backend> Loader<B> {
    /// A loader of all ranks' sequences, whose first epoch is 1.
    pub fn new(cut: Cut, batch: BatchSizes, plan: Plan, seed: u64, device: &B::Device) -> Self {
        Self {
            items: 0..plan.epoch * batch.train as usize,
            next_epoch: AtomicUsize::new(1),
            device: device.clone(),
            cut,
            batch,
            plan,
            seed,
        }
    }

    /// The sequences that a rank reads in so many updates.
    fn sequences_of_rank(&self, updates: usize) -> usize {
        updates * (self.batch.micro * self.batch.steps) as usize
    }

    /// Where a sequence begins; nothing in an epoch that is shorter than the others.
    fn start(&self, epoch: usize, item: usize) -> Option<usize> {
        let updates = self.plan.updates_of(epoch);
        let (size, of_epoch) = (
            self.batch.micro as usize,
            self.sequences_of_rank(self.plan.epoch),
        );
        let (rank, own) = (item / of_epoch, item % of_epoch);
        let micro_batch = own / size * self.batch.world_size + rank;
        let number = updates.start * self.batch.train as usize + micro_batch * size + own % size;
        let start = hash(self.seed, number as u64) % (self.cut.last() as u64 + 1);
        (own < self.sequences_of_rank(updates.len())).then_some(start as usize)
    }

    fn with(&self, items: Range<usize>, device: &B::Device) -> Self {
        Self {
            cut: self.cut.clone(),
            items,
            next_epoch: AtomicUsize::new(self.next_epoch.load(Ordering::Relaxed)),
            device: device.clone(),
            ..*self
        }
    }
}

impl<B: Backend> RankLoader<B, TokenBatch<B>> for Loader<B> {
    fn of_rank(&self, first: EpochOfRank) -> Arc<dyn DataLoader<B, TokenBatch<B>>> {
        let items = self.sequences_of_rank(self.plan.epoch);
        let own = first.rank * items..(first.rank + 1) * items;
        let loader = self.with(own, &self.device);
        loader.next_epoch.store(first.epoch, Ordering::Relaxed);
        Arc::new(loader)
    }

    fn description(&self) -> String {
        let Self {
            batch, plan, seed, ..
        } = self;
        let positions = self.cut.last() + 1;
        format!("{batch:?}, {plan:?}, seed {seed}, {positions} positions")
    }
}

impl<B: Backend> DataLoader<B, TokenBatch<B>> for Loader<B> {
    /// Starts the next epoch, and the random numbers of its steps: a function of seed, rank and
    /// epoch, so that a resumed training draws the same dropout masks as one without the break.
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<TokenBatch<B>> + 'a> {
        let epoch = self.next_epoch.fetch_add(1, Ordering::Relaxed);
        let rank = (self.items.start / self.sequences_of_rank(self.plan.epoch)) as u64;
        let begin = self.plan.updates_of(epoch).start as u64;
        B::seed(&self.device, hash(!self.seed ^ (rank << 32), begin));
        let starts = self.items.clone();
        Box::new(Epoch {
            loader: self,
            starts: starts.filter_map(|item| self.start(epoch, item)).collect(),
            done: 0,
        })
    }

    fn num_items(&self) -> usize {
        self.items.len()
    }

    fn to_device(&self, device: &B::Device) -> Arc<dyn DataLoader<B, TokenBatch<B>>> {
        Arc::new(self.with(self.items.clone(), device))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, TokenBatch<B>>> {
        let at = |item: usize| (self.items.start + item).min(self.items.end);
        Arc::new(self.with(at(start)..at(end), &self.device))
    }
}

/// The batches of one epoch.
struct Epoch<'a, B: Backend> {
    loader: &'a Loader<B>,
    starts: Vec<usize>,
    done: usize,
}

impl<B: Backend> Iterator for Epoch<'_, B> {
    type Item = TokenBatch<B>;

    fn next(&mut self) -> Option<TokenBatch<B>> {
        let size = self.loader.batch.micro as usize;
        let starts = self.starts[self.done..].chunks(size).next()?.to_vec();
        self.done += starts.len();
        Some(self.loader.cut.batch(starts, &self.loader.device))
    }
}

impl<B: Backend> DataLoaderIterator<TokenBatch<B>> for Epoch<'_, B> {
    fn progress(&self) -> Progress {
        Progress::new(self.done, self.starts.len())
    }
}
