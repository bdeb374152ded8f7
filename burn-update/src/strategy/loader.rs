//! Loaders that give each rank its part of an epoch that is one order of all data.

use core::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::data::dataloader::{DataLoader, DataLoaderIterator};
use burn::data::dataset::Dataset;
use burn::tensor::Device;
use burn::tensor::backend::Backend;
use parking_lot::RwLock;

use crate::{DistributedSampler, EpochOfRank};

/// A loader of training data that knows how to give a rank its part: for
/// [`UpdateStrategy::with_train_loader`](crate::UpdateStrategy::with_train_loader).
///
/// [`SampledLoader`] is one for any dataset. Implement it for a loader of your own that does not
/// follow Burn's `DataLoader::slice`.
pub trait RankLoader<B: Backend, O>: Send + Sync {
    /// The loader of a rank, of which each [`iter`](DataLoader::iter) is the next epoch, beginning
    /// with the epoch of `first`. All ranks must have equally many items.
    fn of_rank(&self, first: EpochOfRank) -> Arc<dyn DataLoader<B, O>>;

    /// What must be the same on all ranks, such as the order of the items and its seed. Ranks
    /// compare it before the first step.
    fn description(&self) -> String;
}

/// A loader whose epochs are orders of all data, of which each rank reads its part, by a
/// [`DistributedSampler`]. Each [`iter`](DataLoader::iter) is the next epoch.
///
/// It makes a loader of Burn's for a rank's items: give it the function that does. The
/// [`UpdateStrategy`](crate::UpdateStrategy) gets it too, because Burn's `DataLoader` can only be
/// cut into contiguous parts:
///
/// ```
/// # use burn::data::{dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher}, dataset::InMemDataset};
/// # use burn::{backend::Autodiff, prelude::*};
/// # use burn_flex::Flex;
/// # type B = Autodiff<Flex>;
/// # #[derive(Clone)]
/// # struct MyBatcher;
/// # impl<I: Backend> Batcher<I, u8, Vec<u8>> for MyBatcher {
/// #     fn batch(&self, items: Vec<u8>, _: &I::Device) -> Vec<u8> { items }
/// # }
/// # let dataset = InMemDataset::new(vec![1, 2, 3]);
/// use burn_update::{DistributedSampler, SampledLoader};
///
/// // Was: DataLoaderBuilder::new(batcher).batch_size(8).shuffle(42).num_workers(2).build(dataset)
/// let train = SampledLoader::<B, _, _>::new(DistributedSampler::shuffled(42), dataset, |items| {
///     DataLoaderBuilder::new(MyBatcher).batch_size(8).num_workers(2).build(items)
/// });
/// // SupervisedTraining::new("artifacts", train.clone(), valid)
/// //     .with_training_strategy(strategy.with_train_loader(train).into())
/// # let train: std::sync::Arc<dyn DataLoader<B, Vec<u8>>> = train;
/// # assert_eq!(train.iter().map(|batch| batch.len()).sum::<usize>(), 3);
/// ```
///
/// The function must not shuffle again: then a rank's batches would not be those of its part in
/// order. With several workers Burn's loader returns batches as they are ready, so the items of an
/// epoch are the same and their order is not.
///
/// In a loop of your own, `train.of_rank(EpochOfRank { epoch: 1, rank, ranks })` is the rank's
/// loader.
pub struct SampledLoader<B: Backend, I, O> {
    sampler: DistributedSampler,
    dataset: Arc<dyn Dataset<I>>,
    build: Arc<Build<B, I, O>>,
    device: Option<Device<B>>,
    rank: usize,
    ranks: usize,
    /// Of the rank's items, which a [slice](DataLoader::slice) reduces.
    range: Range<usize>,
    next_epoch: AtomicUsize,
    /// The positions in the dataset of the items of the epoch that was begun last.
    items: Arc<RwLock<Arc<Vec<usize>>>>,
    loader: Arc<dyn DataLoader<B, O>>,
}

/// Makes a loader of the items of an epoch.
type Build<B, I, O> = dyn Fn(EpochItems<I>) -> Arc<dyn DataLoader<B, O>> + Send + Sync;

/// The items of the epoch of a rank that a [`SampledLoader`] has begun last, in its order.
pub struct EpochItems<I> {
    dataset: Arc<dyn Dataset<I>>,
    items: Arc<RwLock<Arc<Vec<usize>>>>,
    /// The same in each epoch.
    length: usize,
}

impl<I: Send + Sync> Dataset<I> for EpochItems<I> {
    fn get(&self, index: usize) -> Option<I> {
        let items = self.items.read().clone();
        self.dataset.get(*items.get(index)?)
    }

    fn len(&self) -> usize {
        self.length
    }
}

impl<B: Backend, I: Send + Sync + 'static, O: 'static> SampledLoader<B, I, O> {
    /// A loader of all items, whose first epoch is 1. `build` makes Burn's loader of the items that
    /// it is given.
    pub fn new<D, F>(sampler: DistributedSampler, dataset: D, build: F) -> Arc<Self>
    where
        D: Dataset<I> + 'static,
        F: Fn(EpochItems<I>) -> Arc<dyn DataLoader<B, O>> + Send + Sync + 'static,
    {
        let all = EpochOfRank {
            epoch: 1,
            rank: 0,
            ranks: 1,
        };
        Self::of(sampler, Arc::new(dataset), Arc::new(build), all)
    }

    /// The same loader whose next epoch is `epoch`, for a training that is resumed without a
    /// [`UpdateStrategy`](crate::UpdateStrategy), which begins with the right one by itself.
    pub fn from_epoch(&self, epoch: usize) -> Arc<Self> {
        let first = EpochOfRank {
            epoch,
            rank: self.rank,
            ranks: self.ranks,
        };
        self.changed(first, self.range.clone(), self.device.clone())
    }

    fn of(
        sampler: DistributedSampler,
        dataset: Arc<dyn Dataset<I>>,
        build: Arc<Build<B, I, O>>,
        first: EpochOfRank,
    ) -> Arc<Self> {
        let range = 0..sampler.items_of_rank(dataset.len(), first.ranks);
        Self::cut(sampler, dataset, build, first, range, None)
    }

    fn cut(
        sampler: DistributedSampler,
        dataset: Arc<dyn Dataset<I>>,
        build: Arc<Build<B, I, O>>,
        first: EpochOfRank,
        range: Range<usize>,
        device: Option<Device<B>>,
    ) -> Arc<Self> {
        let items = Arc::new(RwLock::default());
        let loader = build(EpochItems {
            dataset: dataset.clone(),
            items: Arc::clone(&items),
            length: range.len(),
        });
        let loader = match &device {
            Some(device) => loader.to_device(device),
            None => loader,
        };
        Arc::new(Self {
            sampler,
            dataset,
            build,
            device,
            rank: first.rank,
            ranks: first.ranks,
            range,
            next_epoch: AtomicUsize::new(first.epoch),
            items,
            loader,
        })
    }

    fn changed(
        &self,
        first: EpochOfRank,
        range: Range<usize>,
        device: Option<Device<B>>,
    ) -> Arc<Self> {
        let (dataset, build) = (self.dataset.clone(), self.build.clone());
        Self::cut(self.sampler, dataset, build, first, range, device)
    }

    /// The rank's next epoch.
    fn next(&self) -> EpochOfRank {
        EpochOfRank {
            epoch: self.next_epoch.load(Ordering::Relaxed),
            rank: self.rank,
            ranks: self.ranks,
        }
    }
}

impl<B: Backend, I: Send + Sync + 'static, O: 'static> RankLoader<B, O> for SampledLoader<B, I, O> {
    fn of_rank(&self, first: EpochOfRank) -> Arc<dyn DataLoader<B, O>> {
        let (dataset, build) = (self.dataset.clone(), self.build.clone());
        Self::of(self.sampler, dataset, build, first)
    }

    fn description(&self) -> String {
        format!("{:?} of {} items", self.sampler, self.dataset.len())
    }
}

impl<B: Backend, I: Send + Sync + 'static, O: 'static> DataLoader<B, O> for SampledLoader<B, I, O> {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        let next = self.next();
        self.next_epoch.store(next.epoch + 1, Ordering::Relaxed);
        let own = self.sampler.items(self.dataset.len(), next);
        *self.items.write() = Arc::new(own[self.range.clone()].to_vec());
        self.loader.iter()
    }

    fn num_items(&self) -> usize {
        self.range.len()
    }

    fn to_device(&self, device: &Device<B>) -> Arc<dyn DataLoader<B, O>> {
        self.changed(self.next(), self.range.clone(), Some(device.clone()))
    }

    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<B, O>> {
        let at = |item: usize| (self.range.start + item).min(self.range.end);
        self.changed(self.next(), at(start)..at(end), self.device.clone())
    }
}
