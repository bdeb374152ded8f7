//! A multi-worker data loader that delivers the same batches in the same order on every run.
//!
//! Burn's multi-threaded loader delivers a batch when its worker has it, so the order depends on the scheduler. Here worker `w`
//! of `n` prepares the batches `w, w + n, ..` and sends them to its own bounded channel, and the reader takes one batch from each
//! channel in turn.

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::prelude::*;

use super::windows::{Rows, Windows};

/// Batches that a worker may have ready before they are asked for.
const PREFETCH: usize = 2;

/// Sequences of tokens and, for each of them, the token that follows.
#[derive(Clone, Debug)]
pub struct TokenBatch<B: Backend> {
    /// What the model reads, `[batch, time]`.
    pub inputs: Tensor<B, 2, Int>,
    /// The tokens that it should predict, `[batch, time]`.
    pub targets: Tensor<B, 2, Int>,
}

/// Loads the [windows](Windows) of one epoch after the other: each [`iter`](DataLoader::iter) is the next epoch.
pub struct WindowLoader<B: Backend> {
    windows: Arc<Windows>,
    /// The numbers of the sequences in every epoch, which a [slice](DataLoader::slice) reduces.
    items: Range<usize>,
    workers: usize,
    next_epoch: AtomicUsize,
    device: B::Device,
    pace: Pace,
}

impl<B: Backend> WindowLoader<B> {
    /// A loader whose first epoch is `first_epoch`.
    pub fn new(windows: Windows, workers: usize, first_epoch: usize, device: B::Device) -> Self {
        Self {
            items: 0..windows.most_items(),
            windows: Arc::new(windows),
            workers: workers.max(1),
            next_epoch: AtomicUsize::new(first_epoch),
            device,
            pace: Pace::default(),
        }
    }

    /// How fast the batches of this loader, and of all made from it, are being read.
    pub fn pace(&self) -> Pace {
        self.pace.clone()
    }

    fn with(
        &self,
        items: Range<usize>,
        device: &B::Device,
    ) -> Arc<dyn DataLoader<B, TokenBatch<B>>> {
        Arc::new(Self {
            windows: self.windows.clone(),
            items,
            workers: self.workers,
            next_epoch: AtomicUsize::new(self.next_epoch.load(Ordering::Relaxed)),
            device: device.clone(),
            pace: self.pace.clone(),
        })
    }
}

impl<B: Backend> DataLoader<B, TokenBatch<B>> for WindowLoader<B> {
    /// Starts the next epoch: its workers, and the random numbers of its steps.
    ///
    /// The random numbers are a function of seed and epoch, so a resumed training draws the same dropout masks as one without
    /// the break.
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<TokenBatch<B>> + 'a> {
        let epoch = self.next_epoch.fetch_add(1, Ordering::Relaxed);
        let rank = self.windows.rank_of(self.items.start);
        if let Some(seed) = self.windows.epoch_seed(rank, epoch) {
            B::seed(&self.device, seed);
        }
        let items = self.windows.items(epoch, self.items.clone());
        Box::new(Epoch::<B>::start(self, epoch, items.into()))
    }

    fn num_items(&self) -> usize {
        self.items.len()
    }

    fn to_device(&self, device: &B::Device) -> Arc<dyn DataLoader<B, TokenBatch<B>>> {
        self.with(self.items.clone(), device)
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, TokenBatch<B>>> {
        let at = |item: usize| (self.items.start + item).min(self.items.end);
        self.with(at(start)..at(end), &self.device)
    }
}

/// The batches of one epoch.
struct Epoch<B: Backend> {
    /// One for each worker, in the order in which they are read.
    queues: Vec<Receiver<Rows>>,
    workers: Vec<JoinHandle<()>>,
    next_batch: usize,
    batches: usize,
    progress: Progress,
    context: usize,
    device: B::Device,
    pace: Pace,
    started: Instant,
}

impl<B: Backend> Epoch<B> {
    fn start(loader: &WindowLoader<B>, epoch: usize, items: Arc<[usize]>) -> Self {
        let batch = loader.windows.batch();
        let batches = items.len().div_ceil(batch);
        let stride = loader.workers.min(batches);
        let (queues, workers) = (0..stride)
            .map(|worker| {
                let (sender, receiver) = sync_channel(PREFETCH);
                let windows = loader.windows.clone();
                let items = items.clone();
                let work = move || {
                    for index in (worker..batches).step_by(stride) {
                        let end = ((index + 1) * batch).min(items.len());
                        let rows = windows.cut(epoch, &items[index * batch..end]);
                        // The reader is gone: the epoch was left early.
                        if sender.send(rows).is_err() {
                            return;
                        }
                    }
                };
                let thread = std::thread::Builder::new()
                    .name(format!("loader-{worker}"))
                    .spawn(work)
                    .expect("the system can start a thread");
                (receiver, thread)
            })
            .unzip();
        Self {
            queues,
            workers,
            next_batch: 0,
            batches,
            progress: Progress::new(0, items.len()),
            context: loader.windows.context(),
            device: loader.device.clone(),
            pace: loader.pace.clone(),
            started: Instant::now(),
        }
    }

    /// Uploads on the thread that uses the tensor, because lazy backends keep a queue for each thread.
    fn upload(&self, values: Vec<i32>, rows: usize) -> Tensor<B, 2, Int> {
        Tensor::from_data(TensorData::new(values, [rows, self.context]), &self.device)
    }

    /// Stops the workers, whether or not they are done.
    fn stop(&mut self) -> std::thread::Result<()> {
        self.queues.clear();
        self.workers.drain(..).try_for_each(JoinHandle::join)
    }
}

impl<B: Backend> Iterator for Epoch<B> {
    type Item = TokenBatch<B>;

    fn next(&mut self) -> Option<TokenBatch<B>> {
        if self.next_batch == self.batches {
            return None;
        }
        let queue = &self.queues[self.next_batch % self.queues.len()];
        let Ok(rows) = queue.recv() else {
            // A worker ends before its last batch only by a panic, which is passed on to the reader.
            let panic = self.stop().expect_err("a worker that is gone panicked");
            resume_unwind(panic);
        };
        self.next_batch += 1;
        self.progress.items_processed += rows.rows;
        Some(TokenBatch {
            inputs: self.upload(rows.inputs, rows.rows),
            targets: self.upload(rows.targets, rows.rows),
        })
    }
}

impl<B: Backend> DataLoaderIterator<TokenBatch<B>> for Epoch<B> {
    fn progress(&self) -> Progress {
        self.progress.clone()
    }
}

impl<B: Backend> Drop for Epoch<B> {
    fn drop(&mut self) {
        let tokens = self.progress.items_processed * self.context;
        self.pace.add(tokens, self.started.elapsed());
        // `next` has passed on a worker's panic, or the reader did not need the batch.
        let _ = self.stop();
    }
}

/// Tokens read from a loader and the time for them, over all its epochs so far: the speed of training without validation and
/// records.
#[derive(Clone, Debug, Default)]
pub struct Pace(Arc<Mutex<(usize, Duration)>>);

impl Pace {
    fn add(&self, tokens: usize, time: Duration) {
        let mut pace = self.0.lock().expect("no holder panics");
        pace.0 += tokens;
        pace.1 += time;
    }

    /// Zero where nothing was read.
    pub fn tokens_per_second(&self) -> f64 {
        let (tokens, time) = *self.0.lock().expect("no holder panics");
        if tokens == 0 {
            0.0
        } else {
            tokens as f64 / time.as_secs_f64()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::plan::Plan;
    use crate::gpt::windows::Batches;
    use burn_flex::Flex;

    fn loader(workers: usize, first_epoch: usize) -> WindowLoader<Flex> {
        let text = (0..5000u32).map(|i| (i * i % 251) as u8).collect();
        let batches = Batches {
            size: 3,
            accum: 1,
            ranks: 1,
        };
        let windows = Windows::random(text, 8, batches, 42, Plan::new(20, 7));
        WindowLoader::new(windows, workers, first_epoch, Default::default())
    }

    fn read(epoch: Box<dyn DataLoaderIterator<TokenBatch<Flex>> + '_>) -> Vec<Vec<i32>> {
        epoch
            .map(|batch| batch.inputs.into_data().to_vec().unwrap())
            .collect()
    }

    #[test]
    fn batches_do_not_depend_on_the_workers() {
        let one = loader(1, 1);
        let (first, second) = (read(one.iter()), read(one.iter()));
        assert_eq!((first.len(), second.len()), (6, 7));
        for workers in [2, 3, 16] {
            let many = loader(workers, 1);
            assert_eq!(read(many.iter()), first);
            assert_eq!(read(many.iter()), second);
        }
        assert_eq!(
            read(loader(2, 2).iter()),
            second,
            "resumed at the second epoch"
        );
    }

    #[test]
    fn progress_counts_sequences() {
        let loader = loader(2, 1);
        let mut epoch = loader.iter();
        for done in 1..=6 {
            epoch.next().unwrap();
            let progress = epoch.progress();
            assert_eq!(
                (progress.items_processed, progress.items_total),
                (3 * done, 18)
            );
        }
        assert!(epoch.next().is_none());
        assert_eq!(loader.pace().tokens_per_second(), 0.0);
        drop(epoch);
        assert!(loader.pace().tokens_per_second() > 0.0);
    }

    #[test]
    fn dropping_an_epoch_early_stops_its_workers() {
        let loader = loader(4, 1);
        let mut epoch = loader.iter();
        epoch.next().unwrap();
        drop(epoch); // Joins: a worker that went on would hang here.
        assert_eq!(Arc::strong_count(&loader.windows), 1);
    }

    #[test]
    fn slices_and_devices_keep_order_and_epoch() {
        let whole: Vec<i32> = read(loader(2, 1).iter()).concat();
        let slice = loader(2, 1).slice(4, 9).slice(1, 5);
        assert_eq!(slice.num_items(), 4);
        let moved = slice.to_device(&Default::default());
        let batches = read(moved.iter());
        assert_eq!(batches.iter().map(Vec::len).collect::<Vec<_>>(), [24, 8]);
        assert_eq!(batches.concat(), whole[5 * 8..9 * 8]);
        assert_eq!(loader(2, 1).slice(0, 99).num_items(), 21);
    }
}
