//! Each epoch is a new order of all data, of which each rank reads its part.

use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::record::{FullPrecisionSettings, PrettyJsonFileRecorder};
use burn::tensor::backend::AutodiffBackend;
use burn::train::{Learner, SupervisedTraining};
use burn_update::UpdateStrategy;
use burn_zero::{
    DistributedSampler, EpochOfRank, GroupOptions, ProcessGroup, RankLoader, SampledLoader,
    SilentRenderer, Stage, Tail, ThreadGroup,
};

use crate::Z;
use crate::learner::copy_records;
use crate::loader::{AsTheyAre, loader};
use crate::model::{Model, Row, assert_close, bits, counted, rows};

type Trained = Model<<Z as AutodiffBackend>::InnerBackend>;

const SIZE: usize = 2;
const SEED: u64 = 11;

fn sampled(seed: u64, data: &[Row], size: usize) -> Arc<SampledLoader<Z, Row, Vec<Row>>> {
    let dataset = InMemDataset::new(data.to_vec());
    SampledLoader::new(DistributedSampler::shuffled(seed), dataset, move |items| {
        DataLoaderBuilder::new(AsTheyAre)
            .batch_size(size)
            .build(items)
    })
}

fn indices(epoch: Vec<Vec<Row>>) -> Vec<Vec<usize>> {
    let of = |batch: Vec<Row>| batch.into_iter().map(|row| row.index).collect();
    epoch.into_iter().map(of).collect()
}

/// One rank of Burn's own loop, with batches as large as those of all ranks together.
fn on_the_union(start: &Model<Z>, data: &[Row], ranks: usize, epochs: usize) -> Model<Z> {
    let train = sampled(SEED, data, SIZE * ranks);
    let (mut model, mut optimizer) = (start.clone(), AdamWConfig::new().init::<Z, Model<Z>>());
    for _ in 0..epochs {
        for batch in train.iter() {
            let loss = model.loss_sum(&batch) / counted(&batch) as f32;
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.05, model, gradients);
        }
    }
    model
}

/// What is trained, and where.
struct Job<'a> {
    data: &'a [Row],
    seed: u64,
    epochs: usize,
    /// The epoch to resume from, and where its record is.
    resumed: Option<(usize, &'a Path)>,
    directory: &'a Path,
}

macro_rules! train {
    ($job:expr, $start:expr, $ranks:expr) => {{
        let job: Job<'_> = $job;
        let train = sampled(job.seed, job.data, SIZE);
        let optimizer = crate::adamw::<Z>(Stage::Gradients);
        let strategy = $ranks(optimizer.strategy()).with_train_loader(train.clone());
        let valid = loader(rows(900, 902), 2);
        let mut training = SupervisedTraining::new(job.directory, train, valid)
            .num_epochs(job.epochs)
            .with_application_logger(None)
            .with_file_checkpointer(PrettyJsonFileRecorder::<FullPrecisionSettings>::new())
            .renderer(SilentRenderer)
            .with_training_strategy(strategy.into());
        if let Some((epoch, from)) = job.resumed {
            copy_records(from, job.directory);
            training = training.checkpoint(epoch);
        }
        let learner = Learner::new($start.clone(), optimizer, ConstantLr::new(0.05));
        training.launch(learner).model
    }};
}

fn on_threads(start: &Model<Z>, ranks: usize, job: Job<'_>) -> Trained {
    train!(job, start, |strategy: UpdateStrategy<_>| strategy
        .threads(ranks))
}

#[test]
fn ranks_are_one_rank_with_as_many_times_the_batch() {
    let _turn = crate::turn();
    let start = Model::<Z>::new();
    for ranks in [1, 2, 3] {
        // With a shorter last batch.
        let data = rows(0, 9 * ranks);
        let expected = on_the_union(&start, &data, ranks, 3);
        let directory = tempfile::tempdir().unwrap();
        let job = Job {
            data: &data,
            seed: SEED,
            epochs: 3,
            resumed: None,
            directory: directory.path(),
        };
        let found = on_threads(&start, ranks, job);
        assert_close(&found, &expected, 2e-4);
        assert_ne!(bits(&expected), bits(&start));
    }
}

#[test]
fn a_resumed_training_continues_the_order() {
    let _turn = crate::turn();
    let (start, data) = (Model::<Z>::new(), rows(0, 18));
    let [whole, first, second] = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let job = |epochs, resumed, directory| Job {
        data: &data,
        seed: SEED,
        epochs,
        resumed,
        directory,
    };
    let expected = on_threads(&start, 2, job(3, None, whole.path()));
    on_threads(&start, 2, job(2, None, first.path()));
    let resumed = job(3, Some((2, first.path())), second.path());
    let found = on_threads(&start, 2, resumed);
    assert_eq!(bits(&found), bits(&expected));
}

/// Each rank runs the whole program, and makes its own loader with its own seed.
fn programs(start: &Model<Z>, data: &[Row], seeds: [u64; 2]) -> Result<Vec<Trained>, String> {
    let start = Mutex::new(start.clone());
    let trained = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let start = start.lock().unwrap().clone();
        let directory = tempfile::tempdir().unwrap();
        let job = Job {
            data,
            seed: seeds[group.rank()],
            epochs: 2,
            resumed: None,
            directory: directory.path(),
        };
        let process = |strategy: UpdateStrategy<_>| strategy.process(Arc::new(group));
        train!(job, start, process)
    });
    trained.map_err(|error| error.to_string())
}

#[test]
fn processes_read_what_threads_read_and_stop_if_their_orders_differ() {
    let _turn = crate::turn();
    let (start, data) = (Model::<Z>::new(), rows(0, 14));
    let directory = tempfile::tempdir().unwrap();
    let job = Job {
        data: &data,
        seed: SEED,
        epochs: 2,
        resumed: None,
        directory: directory.path(),
    };
    let threads = on_threads(&start, 2, job);
    for program in programs(&start, &data, [SEED; 2]).unwrap() {
        assert_eq!(bits(&program), bits(&threads));
    }
    let differ = programs(&start, &data, [1, 2]).map(|trained| trained.len());
    assert!(differ.unwrap_err().contains("seed: 2"));
}

#[test]
fn an_epoch_is_the_same_order_at_any_number_of_ranks_and_each_is_another() {
    let data = rows(0, 12);
    let one = sampled(SEED, &data, 4);
    let two = sampled(SEED, &data, 2);
    let first = |rank| EpochOfRank {
        epoch: 1,
        rank,
        ranks: 2,
    };
    let two = [0, 1].map(|rank| two.of_rank(first(rank)).to_device(&Default::default()));
    let mut epochs = Vec::new();
    for _ in 0..3 {
        let expected = indices(one.iter().collect());
        let of_ranks = two.each_ref().map(|rank| indices(rank.iter().collect()));
        for (step, expected) in expected.iter().enumerate() {
            // In turn, as PyTorch's.
            let union = [0, 0, 1, 1].iter().zip([0, 1, 0, 1]);
            let union: Vec<_> = union.map(|(&at, rank)| of_ranks[rank][step][at]).collect();
            assert_eq!(union, *expected);
        }
        let mut all = expected.concat();
        epochs.push(expected);
        all.sort_unstable();
        assert_eq!(all, (0..12).collect::<Vec<_>>());
    }
    assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2]);
    let resumed = one.from_epoch(3);
    assert_eq!(indices(resumed.iter().collect()), epochs[2]);
}

/// Burn's workers return batches as they are ready.
#[test]
fn several_workers_read_the_same_items() {
    let data = rows(0, 13);
    let dataset = InMemDataset::new(data);
    let sampler = DistributedSampler::shuffled(SEED).with_tail(Tail::Drop);
    let train = SampledLoader::<Z, _, _>::new(sampler, dataset, |items| {
        DataLoaderBuilder::new(AsTheyAre)
            .batch_size(2)
            .num_workers(2)
            .build(items)
    });
    let rank = train.of_rank(EpochOfRank {
        epoch: 1,
        rank: 1,
        ranks: 2,
    });
    for epoch in 1..=3 {
        let mut found = indices(rank.iter().collect()).concat();
        let mut expected = sampler.items(
            13,
            EpochOfRank {
                epoch,
                rank: 1,
                ranks: 2,
            },
        );
        assert_eq!(expected.len(), 6);
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected);
    }
}
