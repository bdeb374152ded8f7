//! A training goes from any number of ranks to any other through a record, bit for bit.

use std::fs;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::cosine::{CosineAnnealingLrScheduler, CosineAnnealingLrSchedulerConfig};
use burn::module::{AutodiffModule, Module, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamW, AdamWConfig, AdanConfig, GradientsParams,
    MultiGradientsParams, Optimizer, RmsPropConfig, SgdConfig,
};
use burn::prelude::*;
use burn::record::Record;
use burn::tensor::DType;
use burn_accum::AccumConfig;
use burn_amp::GradScalerConfig;
use burn_decorator::gradient::non_finite_on_any_rank;
use burn_flex::Flex;
use burn_store::{ModuleSnapshot, SafetensorsStore};
use burn_update::{Group, Groups, Paths, Update, UpdateError};
use burn_zero::record::{
    Entry, Keep, ShardedRecord, TensorSlice, TensorSpec, TrainingState, save_sharded,
};
use burn_zero::{
    OffloadConfig, ParameterShards, Partition, ProcessGroup, RankReduction, RecordFault, Recorder,
    ReduceOverRanks, ShardingFault, SingleRank, Stage, Training, ZeroError, ZeroSettings,
    consolidate,
};
use tempfile::tempdir;

use super::optimizers::trusting;
use super::support::*;

type Adam = OptimizerAdaptor<AdamW, ParameterShards<B>, B>;
type Run<M> = Training<M, Update<M, B>, CosineAnnealingLrScheduler>;

fn adam() -> Adam {
    AdamWConfig::new().init()
}

fn build<M: AutodiffModule<B> + 'static>(
    group: Arc<dyn ProcessGroup>,
    stage: Stage,
    model: M,
) -> Result<(Run<M>, Recorder), UpdateError> {
    build_sharded(group, small_buckets(stage), model, adam())
}

/// With a loss scaler and windows of three micro-batches.
fn build_sharded<M: AutodiffModule<B> + 'static>(
    group: Arc<dyn ProcessGroup>,
    sharding: ZeroSettings,
    model: M,
    inner: impl Optimizer<ParameterShards<B>, B> + 'static,
) -> Result<(Run<M>, Recorder), UpdateError> {
    let (update, reduction) = reduced(inner, group, sharding)?;
    finished(update, &reduction, model)
}

/// The training of an update, with the parts after its reduction.
fn finished<M: AutodiffModule<B> + 'static>(
    update: Update<M, B>,
    reduction: &RankReduction,
    model: M,
) -> Result<(Run<M>, Recorder), UpdateError> {
    let mut update = update
        .accumulate(AccumConfig::mean(3))?
        .scale(GradScalerConfig::default())?;
    let model = update.prepare(model)?;
    let recorder = reduction.recorder()?;
    let training = Training {
        model,
        optimizer: update,
        scheduler: CosineAnnealingLrSchedulerConfig::new(0.05, 100)
            .init()
            .unwrap(),
    };
    Ok((training, recorder))
}

/// So many micro-steps; one of them overflows on one rank.
fn train(mut run: Run<Net<B>>, steps: Range<usize>, group: &dyn ProcessGroup) -> Run<Net<B>> {
    for step in steps {
        let mut loss = run
            .model
            .loss(batch(step, group.rank(), group.world_size()));
        if step == 1 && group.rank() == group.world_size() - 1 {
            loss = loss * f32::INFINITY;
        }
        let gradients = run.optimizer.backward(&run.model, loss);
        let lr = run.scheduler.step();
        run.model = run.optimizer.step(lr, run.model, gradients).unwrap();
    }
    run
}

/// Trains for some micro-steps from the beginning and saves.
fn save(dir: &Path, world_size: usize, stage: Stage, steps: usize) {
    save_with(dir, world_size, &small_buckets(stage), steps, &adam);
}

fn save_with<O: Optimizer<ParameterShards<B>, B> + 'static>(
    dir: &Path,
    world_size: usize,
    sharding: &ZeroSettings,
    steps: usize,
    inner: &(impl Fn() -> O + Sync),
) {
    let saved = on_each_rank(world_size, |group| {
        let model = Net::new(&Default::default());
        let built = build_sharded(group.clone(), sharding.clone(), model, inner());
        let (run, recorder) = built.unwrap();
        let run = train(run, 0..steps, &*group);
        let state = TrainingState::at_step(steps as u64);
        recorder.save::<B, _, _, _>(dir, run.by_ref(), state, Keep::default())
    });
    saved.into_iter().for_each(|saved| drop(saved.unwrap()));
}

#[test]
fn it_is_the_same_on_any_number_of_ranks() {
    assert_same_on_any_number_of_ranks(Partition::Flat, &adam);
}

#[test]
fn so_is_that_of_an_optimizer_on_the_host() {
    assert_same_on_any_number_of_ranks(Partition::Flat, &|| {
        OffloadConfig::default().init().unwrap()
    });
}

#[test]
fn so_is_that_of_each_family() {
    let flat = Partition::Flat;
    assert_same_on_any_number_of_ranks(flat, &|| AdamConfig::new().init());
    let rmsprop = RmsPropConfig::new().with_centered(true);
    assert_same_on_any_number_of_ranks(flat, &|| rmsprop.init());
    let adagrad = AdaGradConfig::new().with_lr_decay(0.01);
    assert_same_on_any_number_of_ranks(flat, &|| adagrad.init());
    assert_same_on_any_number_of_ranks(flat, &|| AdanConfig::new().init());
    assert_same_on_any_number_of_ranks(Partition::Whole, &trusting);
}

fn assert_same_on_any_number_of_ranks<O: Optimizer<ParameterShards<B>, B> + 'static>(
    partition: Partition,
    inner: &(impl Fn() -> O + Sync),
) {
    let sharding = |stage| ZeroSettings {
        partition,
        ..small_buckets(stage)
    };
    for (from, stage) in [
        (4, Stage::Gradients),
        (1, Stage::OptimizerState),
        (2, Stage::DataParallel),
        (4, Stage::Parameters),
        (3, Stage::Parameters),
    ] {
        let first = tempdir().unwrap();
        save_with(first.path(), from, &sharding(stage), 7, inner);
        let saved = contents(first.path());
        let names: Vec<_> = saved.0.keys().map(String::as_str).collect();
        assert!(names.contains(&"model/tied") && names.contains(&"model/never"));
        let has_state = |name: &str| {
            let mut names = names.iter();
            names.any(|n| n.starts_with("optimizer/") && n.contains(name))
        };
        assert!(has_state("tied") && !has_state("never"), "{names:?}");
        let loss_scale = saved.1.optimizer.pointer("/parts/scale/values/scale");
        assert!(loss_scale.is_some(), "{}", saved.1.optimizer);

        for world_size in 1..=4 {
            for stage in WITH_PARAMETERS {
                let second = tempdir().unwrap();
                on_each_rank(world_size, |group| {
                    // Other weights than the saved ones, on each rank.
                    let mut model = Net::new(&Default::default());
                    let noise = values(5, group.rank() + 50);
                    model.sometimes = Param::from_data(noise.as_slice(), &Default::default());
                    let (run, recorder) =
                        build_sharded(group, sharding(stage), model, inner()).unwrap();
                    let (run, state) = recorder
                        .load::<B, _, _, _>(first.path(), None, run)
                        .unwrap();
                    let state = state.expect("there is a record");
                    recorder
                        .save::<B, _, _, _>(second.path(), run.by_ref(), state, Keep::All)
                        .unwrap();
                });
                assert!(
                    saved == contents(second.path()),
                    "{from} to {world_size}, {stage:?}"
                );
            }
        }
    }
}

#[test]
fn that_of_stage_3_is_that_of_stage_2() {
    let [whole, sharded] = [Stage::Gradients, Stage::Parameters].map(|stage| {
        let dir = tempdir().unwrap();
        save(dir.path(), 3, stage, 7);
        contents(dir.path())
    });
    assert!(whole == sharded);
}

/// From one partition to the other and back: pieces are flat in one, and have the shapes of
/// parameters in the other.
#[test]
fn it_is_the_same_in_pieces_and_whole() {
    for stage in WITH_PARAMETERS {
        let dirs = [(); 3].map(|()| tempdir().unwrap());
        save(dirs[0].path(), 3, stage, 7);
        for (at, world_size, partition) in [(0, 2, Partition::Whole), (1, 3, Partition::Flat)] {
            let [from, to] = [dirs[at].path(), dirs[at + 1].path()];
            on_each_rank(world_size, |group| {
                let sharding = ZeroSettings {
                    partition,
                    ..small_buckets(stage)
                };
                let model = Net::new(&Default::default());
                let (run, recorder) =
                    build_sharded(group.clone(), sharding, model, adam()).unwrap();
                let (run, state) = recorder.load::<B, _, _, _>(from, None, run).unwrap();
                recorder
                    .save::<B, _, _, _>(to, run.by_ref(), state.unwrap(), Keep::All)
                    .unwrap();
                // What was loaded goes on.
                train(run, 7..10, &*group);
            });
        }
        assert!(
            contents(dirs[0].path()) == contents(dirs[2].path()),
            "{stage:?}"
        );
    }
}

#[test]
fn training_goes_on_bit_for_bit() {
    for stage in WITH_PARAMETERS {
        // Micro-step 1 was dropped.
        for at in [4, 7] {
            let dir = tempdir().unwrap();
            let straight = on_ranks(3, |group| {
                let (run, _) = build(group.clone(), stage, Net::new(&Default::default())).unwrap();
                Ok(parameters(&train(run, 0..11, &*group).model))
            });
            save(dir.path(), 3, stage, at);
            let resumed = on_ranks(3, |group| {
                let (run, recorder) =
                    build(group.clone(), stage, Net::new(&Default::default())).unwrap();
                let (run, state) = recorder.load::<B, _, _, _>(dir.path(), None, run).unwrap();
                assert_eq!(state.unwrap().step, at as u64);
                Ok(parameters(&train(run, at..11, &*group).model))
            });
            assert_eq!(straight, resumed, "{stage:?}, {at}");
        }
    }
}

/// State is named by its parameter, as one of Burn's optimizers saves it. Records of before have all
/// keys of the update's tree in its names.
#[test]
fn a_record_with_former_names_of_state_is_loaded() {
    assert_loaded_with_former_names(&|group, net| build(group, Stage::Gradients, net));
}

/// Each group's optimizer has its place in the update's tree.
#[test]
fn so_is_one_of_groups_of_parameters() {
    assert_loaded_with_former_names(&|group, net| {
        let reduction = RankReduction::new(small_buckets(Stage::Gradients), group)?;
        let momentum = MomentumConfig::new();
        let biases = SgdConfig::new().with_momentum(Some(momentum)).init();
        let groups = Groups::new(adam()).with("biases", Group::new(Paths::glob("*bias"), biases));
        let update = Update::of_groups(groups).reduce_by(&reduction)?;
        finished(update, &reduction, net)
    });
}

type Build<'a> = dyn Fn(Arc<dyn ProcessGroup>, Net<B>) -> Result<(Run<Net<B>>, Recorder), UpdateError>
    + Sync
    + 'a;

/// A record whose state has its former names is loaded bit for bit.
fn assert_loaded_with_former_names(build: &Build<'_>) {
    let dirs = [(); 3].map(|()| tempdir().unwrap());
    let [first, former, again] = dirs.each_ref().map(tempfile::TempDir::path);
    let built = |group| build(group, Net::new(&Default::default())).unwrap();
    on_each_rank(2, |group| {
        let (run, recorder) = built(group.clone());
        let run = train(run, 0..7, &*group);
        let state = TrainingState::at_step(7);
        let saved = recorder.save::<B, _, _, _>(first, run.by_ref(), state, Keep::default());
        saved.unwrap();
    });
    let mut record = ShardedRecord::open(first, None).unwrap();
    let tensors: Vec<_> = record.tensors().collect();
    let names: Vec<_> = tensors.iter().map(|tensor| tensor.name.clone()).collect();
    let paths = names.iter().filter_map(|name| name.strip_prefix("model/"));
    let paths: Vec<_> = paths.map(|path| format!("{path}.")).collect();
    let renamed = |name: &str| {
        let Some(state) = name.strip_prefix("optimizer/") else {
            return name.to_owned();
        };
        let (optimizer, state) = state.split_once('/').unwrap_or(("record", state));
        let path = paths.iter().find(|path| state.starts_with(&***path));
        let path = path.expect("it is of a parameter");
        let keys = state[path.len()..].replace('.', ".Map.");
        format!("optimizer/parts.optimizer.values.{optimizer}.Tree.Map.{path}Map.{keys}.Tensor")
    };
    let entries = tensors.into_iter().map(|tensor| {
        let bytes = record.read(&TensorSlice::whole(tensor.clone())).unwrap();
        let renamed = TensorSpec::new(renamed(&tensor.name), tensor.dtype, tensor.shape);
        Entry::new(TensorSlice::whole(renamed), bytes)
    });
    let entries = entries.collect();
    let state = record.state().clone();
    save_sharded(former, &SingleRank::new(), entries, state, Keep::All).unwrap();
    assert_ne!(contents(former).0, contents(first).0, "nothing was renamed");

    on_each_rank(3, |group| {
        let (run, recorder) = built(group);
        let (run, state) = recorder.load::<B, _, _, _>(former, None, run).unwrap();
        let saved = recorder.save::<B, _, _, _>(again, run.by_ref(), state.unwrap(), Keep::All);
        saved.unwrap();
    });
    assert!(contents(again) == contents(first));
}

/// Such as that of a `ZeroOptimizer`, which came before updates.
#[test]
fn a_record_of_an_optimizer_that_is_no_update_says_what_can_be_done() {
    let dir = tempdir().unwrap();
    let errors = on_each_rank(2, |group| {
        let (run, recorder) =
            build(group, Stage::Gradients, Net::new(&Default::default())).unwrap();
        let by_burn = Training {
            model: &run.model,
            optimizer: &AdamWConfig::new().init(),
            scheduler: &run.scheduler,
        };
        let state = TrainingState::at_step(1);
        let saved = recorder.save::<B, _, _, _>(dir.path(), by_burn, state, Keep::All);
        saved.unwrap();
        let loaded = recorder.load::<B, _, _, _>(dir.path(), None, run);
        loaded.map(drop).unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        let says_what_to_do = text.contains("no `Update`") && text.contains("`consolidate`");
        assert!(
            matches!(error, ZeroError::Sharding(_)) && says_what_to_do,
            "{text}"
        );
    }
}

/// The sums of an incomplete window are each rank's own.
#[test]
fn an_incomplete_window_is_not_saved() {
    let dir = tempdir().unwrap();
    let errors = on_each_rank(2, |group| {
        let model = Net::new(&Default::default());
        let (run, recorder) = build(group.clone(), Stage::Gradients, model).unwrap();
        let run = train(run, 0..5, &*group);
        let state = TrainingState::at_step(1);
        recorder
            .save::<B, _, _, _>(dir.path(), run.by_ref(), state, Keep::All)
            .unwrap_err()
    });
    for error in errors {
        let text = error.to_string();
        assert!(
            matches!(error, ZeroError::Sharding(_)) && text.contains("save after an update"),
            "{text}"
        );
    }
}

/// The state of a scheduler that keeps the best loss.
#[derive(Record, Clone)]
struct PlateauRecord<B: Backend> {
    best: f64,
    rate: <f64 as LrScheduler>::Record<B>,
}

#[derive(Clone)]
struct Plateau {
    best: f64,
}

impl LrScheduler for Plateau {
    type Record<B: Backend> = PlateauRecord<B>;

    fn step(&mut self) -> f64 {
        0.05
    }

    fn to_record<B: Backend>(&self) -> Self::Record<B> {
        let best = self.best;
        PlateauRecord { best, rate: () }
    }

    fn load_record<B: Backend>(self, record: Self::Record<B>) -> Self {
        Self { best: record.best }
    }
}

#[test]
fn state_of_a_scheduler_that_cannot_be_kept_is_refused_before_anything_is_written() {
    let dir = tempdir().unwrap();
    let results = on_each_rank(2, |group| {
        let model = Net::new(&Default::default());
        let (run, recorder) = build(group.clone(), Stage::Gradients, model).unwrap();
        let with = |best| Training {
            model: run.model.clone(),
            optimizer: run.optimizer.clone(),
            scheduler: Plateau { best },
        };
        let save = |best| {
            let state = TrainingState::at_step(1);
            recorder.save::<B, _, _, _>(dir.path(), with(best).by_ref(), state, Keep::All)
        };
        let refused = [f64::INFINITY, f64::NAN].map(|best| save(best).unwrap_err().to_string());
        let written = fs::read_dir(dir.path()).unwrap().count();
        group.barrier("counted").unwrap();

        save(2.5).unwrap();
        let loaded = recorder.load::<B, _, _, _>(dir.path(), None, with(0.0));
        let best = loaded.unwrap().0.scheduler.best;
        let other = recorder.load::<B, _, _, _>(dir.path(), None, run.clone());
        (
            refused,
            written,
            best,
            other.map(drop).unwrap_err().to_string(),
        )
    });
    for ([infinite, nan], written, best, other) in results {
        assert_eq!(
            infinite,
            "state of the scheduler: best is inf, which JSON cannot hold"
        );
        assert_eq!(
            nan,
            "state of the scheduler: best is NaN, which JSON cannot hold"
        );
        assert_eq!((written, best), (0, 2.5));
        let expected = "state of the scheduler: the record has that of another scheduler: ";
        assert!(other.starts_with(expected), "{other}");
    }
}

#[test]
fn a_record_of_another_model_is_named_and_a_torn_one_is_no_new_start() {
    let dir = tempdir().unwrap();
    let resume = |world_size: usize| {
        on_each_rank(world_size, |group| {
            let net = Net::new(&Default::default());
            let (run, recorder) = build(group, Stage::Gradients, net).unwrap();
            let resumed = recorder.load::<B, _, _, _>(dir.path(), None, run);
            resumed
                .map(|(_, state)| state)
                .map_err(|error| error.to_string())
        })
    };
    assert!(resume(2).into_iter().all(|found| found == Ok(None)));

    save(dir.path(), 2, Stage::Gradients, 7);
    let errors = on_each_rank(2, |group| {
        let linear = LinearConfig::new(7, 11).init::<B>(&Default::default());
        let (run, recorder) = build(group, Stage::Gradients, linear).unwrap();
        let loaded = recorder.load::<B, _, _, _>(dir.path(), None, run);
        loaded.map(drop).unwrap_err().to_string()
    });
    for error in errors {
        assert!(
            error.contains("tensor first.bias, which the model has not"),
            "{error}"
        );
    }

    let record = ShardedRecord::open(dir.path(), None).unwrap();
    fs::remove_file(record.path().join("rank-1-of-2.safetensors")).unwrap();
    for found in resume(3) {
        assert!(
            found
                .unwrap_err()
                .contains("rank-1-of-2.safetensors is missing"),
            "the file is named"
        );
    }
}

/// Which has one parameter more or less than another.
#[derive(Module, Debug)]
struct Pair<B: Backend> {
    first: Linear<B>,
    second: Option<Linear<B>>,
}

/// The second parameter has one element: at stage 3 of several ranks, most have none of it.
#[test]
fn a_record_without_a_parameter_is_of_another_model_on_all_ranks() {
    for stage in WITH_PARAMETERS {
        let dir = tempdir().unwrap();
        let pair = |has_second: bool| {
            let linear = |inputs| {
                let config = LinearConfig::new(inputs, 1).with_bias(false);
                config.init::<B>(&Default::default())
            };
            let second = has_second.then(|| linear(1));
            Pair {
                first: linear(7),
                second,
            }
        };
        on_each_rank(3, |group| {
            let (run, recorder) = build(group, stage, pair(false)).unwrap();
            let state = TrainingState::at_step(1);
            let saved = recorder.save::<B, _, _, _>(dir.path(), run.by_ref(), state, Keep::All);
            saved.unwrap();
        });
        let errors = on_each_rank(3, |group| {
            let (run, recorder) = build(group, stage, pair(true)).unwrap();
            let loaded = recorder.load::<B, _, _, _>(dir.path(), None, run);
            loaded.map(drop).unwrap_err()
        });
        for error in errors {
            assert!(
                matches!(&error, ZeroError::Record(RecordFault::OtherModel { reason, .. })
                    if reason == "has no entry `model/second.weight`"),
                "{stage:?}: {error}"
            );
        }
    }
}

/// A model in bf16.
#[derive(Module, Debug)]
struct Low<B: Backend> {
    weight: Param<Tensor<B, 1>>,
}

type LowRun = Training<Low<B>, Update<Low<B>, B>, f64>;

/// A training of that model after a step, and its recorder.
fn low(
    group: Arc<dyn ProcessGroup>,
    inner: impl Optimizer<ParameterShards<B>, B> + 'static,
) -> (LowRun, Recorder) {
    let settings = ZeroSettings::stage(Stage::Gradients);
    let (mut update, reduction) = reduced(inner, group, settings).unwrap();
    let weight = values(6, 1);
    let weight = Tensor::<B, 1>::from_data(weight.as_slice(), &Default::default());
    let weight = Param::from_tensor(weight.cast(DType::BF16).detach());
    let model = update.prepare(Low { weight }).unwrap();
    let recorder = reduction.recorder().unwrap();
    let training = Training {
        model,
        optimizer: update,
        scheduler: 0.05,
    };
    (low_step(training), recorder)
}

fn low_step(mut run: LowRun) -> LowRun {
    let loss = run.model.weight.val().square().sum();
    let gradients = run.optimizer.backward(&run.model, loss);
    run.model = run.optimizer.step(0.05, run.model, gradients).unwrap();
    run
}

/// Burn's record of a tensor has no type: bf16 moments would come back in f32, and meet bf16
/// gradients.
#[test]
fn state_whose_type_a_record_does_not_keep_is_refused() {
    let dir = tempdir().unwrap();
    let errors = on_each_rank(2, |group| {
        let (run, recorder) = low(group.clone(), adam());
        let save = |at| (dir.path(), TrainingState::at_step(at));
        let (path, state) = save(1);
        let saved = recorder.save::<B, _, _, _>(path, run.by_ref(), state, Keep::All);
        let saved = saved.map(drop).unwrap_err();
        group.barrier("refused").unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        group.barrier("nothing written").unwrap();

        // No state, and f32 state by design.
        let (plain, recorder) = low(group.clone(), SgdConfig::new().init());
        let (path, state) = save(2);
        let kept = recorder.save::<B, _, _, _>(path, plain.by_ref(), state, Keep::All);
        kept.unwrap();
        recorder.load::<B, _, _, _>(path, None, plain).unwrap();
        let (host, recorder) = low(group.clone(), OffloadConfig::default().init().unwrap());
        let (path, state) = save(3);
        let kept = recorder.save::<B, _, _, _>(path, host.by_ref(), state, Keep::All);
        kept.unwrap();
        let (resumed, _) = recorder.load::<B, _, _, _>(path, None, host).unwrap();
        low_step(resumed);

        let (run, recorder) = low(group, adam());
        let loaded = recorder.load::<B, _, _, _>(path, None, run);
        [saved, loaded.map(drop).unwrap_err()]
    });
    for error in errors.into_iter().flatten() {
        let ZeroError::Sharding(ShardingFault::StateDtype { path, dtype, kept }) = &error else {
            panic!("{error}")
        };
        assert_eq!(
            (path.as_str(), *dtype, *kept),
            ("weight", DType::BF16, DType::F32)
        );
        assert!(error.to_string().contains("OffloadedAdamW"), "{error}");
    }
}

/// Frozen parameters, buffers, integers, bools.
#[derive(Module, Debug)]
struct Odd<B: Backend> {
    linear: Linear<B>,
    frozen: Linear<B>,
    norm: BatchNorm<B>,
    counts: Param<Tensor<B, 1, Int>>,
    mask: Param<Tensor<B, 2, Bool>>,
}

impl<B: Backend> Odd<B> {
    fn new(seed: usize, device: &B::Device) -> Self {
        let weight = |seed: usize| {
            let values = values(35, seed);
            Tensor::<B, 1>::from_data(values.as_slice(), device).reshape([7, 5])
        };
        let linear = |seed: usize| {
            let mut linear = LinearConfig::new(7, 5).with_bias(false).init(device);
            linear.weight = Param::from_tensor(weight(seed));
            linear
        };
        Self {
            linear: linear(seed),
            frozen: linear(seed + 1).no_grad(),
            norm: BatchNormConfig::new(5).init(device),
            counts: Param::initialized(
                ParamId::new(),
                Tensor::from_data([seed as i32, 3, 5], device),
            ),
            mask: Param::initialized(
                ParamId::new(),
                Tensor::from_data([[seed == 1, true], [false, seed == 2]], device),
            ),
        }
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let y = self.linear.forward(x.clone()) + self.frozen.forward(x);
        self.norm.forward(y).square().mean()
    }
}

#[test]
fn all_that_a_module_holds_comes_back_and_plain_burn_loads_it() {
    let dir = tempdir().unwrap();
    let run = |world_size: usize, seed: usize, load: bool| {
        on_ranks(world_size, |group| {
            let odd = Odd::new(seed, &Default::default());
            let (mut run, recorder) = build(group.clone(), Stage::Gradients, odd).unwrap();
            if load {
                run = recorder
                    .load::<B, _, _, _>(dir.path(), None, run)
                    .unwrap()
                    .0;
            }
            for step in 0..3 {
                let x = batch(step, group.rank(), world_size);
                let gradients = run.optimizer.backward(&run.model, run.model.loss(x));
                run.model = run.optimizer.step(0.05, run.model, gradients)?;
            }
            if !load {
                let state = TrainingState::at_step(1);
                recorder
                    .save::<B, _, _, _>(dir.path(), run.by_ref(), state, Keep::All)
                    .unwrap();
            }
            Ok(world_size)
        });
    };
    run(2, 1, false);
    let (saved, _) = contents(dir.path());
    assert_eq!(
        saved["model/counts"],
        [1_i32, 3, 5].map(i32::to_le_bytes).concat()
    );
    assert_eq!(saved["model/mask"], [1, 1, 0, 0]);

    let file = dir.path().join("model.safetensors");
    consolidate(dir.path(), &file).unwrap();
    let mut plain = Odd::<Flex>::new(2, &Default::default());
    let mut store = SafetensorsStore::from_file(&file);
    let applied = plain.load_from(&mut store).unwrap();
    assert!(
        applied.unused.is_empty() && applied.missing.is_empty() && applied.errors.is_empty(),
        "{applied}"
    );
    let bytes =
        |values: Vec<f32>| -> Vec<u8> { values.into_iter().flat_map(f32::to_le_bytes).collect() };
    let loaded: Vec<_> = parameters(&plain).into_iter().map(bytes).collect();
    let names = [
        "linear.weight",
        "frozen.weight",
        "norm.gamma",
        "norm.beta",
        "norm.running_mean",
        "norm.running_var",
    ];
    assert_eq!(loaded.len(), names.len());
    for (loaded, name) in loaded.iter().zip(names) {
        assert!(*loaded == saved[&format!("model/{name}")], "{name}");
    }
    assert_eq!(
        plain.mask.val().into_data(),
        [[true, true], [false, false]].into()
    );
    // It trains on.
    run(3, 2, true);
}

/// A model is prepared again after parameters were frozen or weights loaded: the recorder is for
/// that one.
#[test]
fn a_recorder_is_for_the_model_that_was_prepared_last() {
    let dir = tempdir().unwrap();
    let losses = on_ranks(2, |group| {
        let adam = AdamWConfig::new().init();
        let settings = small_buckets(Stage::Gradients);
        let (mut update, reduction) = reduced(adam, group.clone(), settings)?;
        let mut net = update.prepare(Net::<B>::new(&Default::default()))?;
        let recorder = reduction.recorder()?;
        net.sometimes = net.sometimes.no_grad();
        let model = update.prepare(net)?;
        let run = Training {
            model,
            optimizer: update,
            scheduler: 0.05,
        };
        let state = TrainingState::at_step(1);
        let saved = recorder.save::<B, _, _, _>(dir.path(), run.by_ref(), state, Keep::All);
        saved.unwrap();
        let (mut run, _) = recorder.load::<B, _, _, _>(dir.path(), None, run).unwrap();
        let before = parameters(&run.model);
        let loss = run.model.loss(batch(0, group.rank(), 2));
        let gradients = run.optimizer.backward(&run.model, loss);
        run.model = run.optimizer.step(0.05, run.model, gradients)?;
        assert_ne!(before, parameters(&run.model));
        Ok(parameters(&run.model))
    });
    assert!(!losses.is_empty());
}

/// A thread whose optimizer was dropped decides alone again, though its recorder is still there.
#[test]
fn a_recorder_keeps_no_dropped_optimizer() {
    let dir = tempdir().unwrap();
    on_ranks(2, |group| {
        let (run, recorder) = build(
            group.clone(),
            Stage::Gradients,
            Net::new(&Default::default()),
        )
        .unwrap();
        let state = TrainingState::at_step(1);
        let saved = recorder.save::<B, _, _, _>(dir.path(), run.by_ref(), state.clone(), Keep::All);
        saved.unwrap();
        drop(run);
        if group.rank() == 0 {
            let own = vec!["first.weight".to_owned()];
            assert_eq!(non_finite_on_any_rank(own.clone()), own);
        }
        group.barrier("rank 0 decided alone")?;

        let (run, _) = build(group, Stage::Gradients, Net::new(&Default::default())).unwrap();
        let saved = recorder.save::<B, _, _, _>(dir.path(), run.by_ref(), state, Keep::All);
        assert!(saved.unwrap_err().to_string().contains("was dropped"));
        Ok(())
    });
}

/// A layer of another crate, whose record is a tuple.
#[derive(Clone)]
struct Counting<O> {
    inner: O,
    steps: usize,
}

impl<M: AutodiffModule<B>, O: Optimizer<M, B>> Optimizer<M, B> for Counting<O> {
    type Record = (O::Record, usize);

    fn step(&mut self, lr: f64, module: M, gradients: GradientsParams) -> M {
        self.steps += 1;
        self.inner.step(lr, module, gradients)
    }

    fn step_multi(&mut self, _: f64, _: M, _: MultiGradientsParams) -> M {
        unreachable!("these tests have one device a rank")
    }

    fn to_record(&self) -> Self::Record {
        (self.inner.to_record(), self.steps)
    }

    fn load_record(mut self, (inner, steps): Self::Record) -> Self {
        self.inner = self.inner.load_record(inner);
        Self { steps, ..self }
    }
}

#[test]
fn a_layer_may_have_a_tuple_as_its_record() {
    let dir = tempdir().unwrap();
    for (ranks, before) in [(2, 0), (3, 3)] {
        let sharding = small_buckets(Stage::Gradients);
        let counted = on_each_rank(ranks, |group| {
            let update = reduced(adam(), group.clone(), sharding.clone());
            let (mut inner, reduction) = update.unwrap();
            let model = inner.prepare(Net::<B>::new(&Default::default())).unwrap();
            let recorder = reduction.recorder()?;
            let training = Training {
                model,
                optimizer: Counting { inner, steps: 0 },
                scheduler: 0.05,
            };
            let (mut run, _) = recorder.load(dir.path(), None, training)?;
            assert_eq!(run.optimizer.steps, before);
            for step in 0..3 {
                let loss = run.model.loss(batch(step, group.rank(), ranks));
                let gradients = GradientsParams::from_grads(loss.backward(), &run.model);
                run.model = run.optimizer.step(0.05, run.model, gradients);
            }
            let state = TrainingState::at_step(run.optimizer.steps as u64);
            recorder.save(dir.path(), run.by_ref(), state, Keep::All)?;
            Ok::<_, ZeroError>(run.optimizer.steps)
        });
        for steps in counted {
            assert_eq!(steps.unwrap(), before + 3);
        }
    }
}

#[test]
fn a_layer_may_be_frozen_when_it_is_loaded() {
    let dir = tempdir().unwrap();
    save(dir.path(), 2, Stage::Gradients, 4);
    for stage in WITH_PARAMETERS {
        let loaded = on_each_rank(2, |group| {
            let mut net = Net::new(&Default::default());
            net.sometimes = net.sometimes.set_require_grad(false);
            net.first = net.first.no_grad();
            let (run, recorder) = build(group.clone(), stage, net).unwrap();
            let (run, _) = recorder.load::<B, _, _, _>(dir.path(), None, run)?;
            let loaded = parameters(&run.model);
            let run = train(run, 4..7, &*group);
            let trained = parameters(&run.model);
            assert!(loaded[..2] == trained[..2] && loaded != trained);
            Ok::<_, ZeroError>(trained)
        });
        loaded.into_iter().for_each(|loaded| drop(loaded.unwrap()));
    }
}
