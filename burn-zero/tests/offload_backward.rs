//! Gradients of an optimizer on the host leave the device while backward goes on: in its own
//! process, as it counts bytes.

#[path = "support/layers.rs"]
mod layers;
#[path = "support/probe.rs"]
mod probe;

use std::sync::{Arc, Mutex, MutexGuard};

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module, ModuleMapper, Param};
use burn::optim::{GradientsParams, MultiGradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::AccumConfig;
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::{
    GroupOptions, HostAdamWConfig, Memory, OffloadConfig, OffloadedAdamW, ParameterShards,
    Partition, ProcessGroup, ReduceOverRanks, Sharded, SingleRank, Stage, ThreadGroup,
    ZeroSettings,
};
use layers::{Layers as Model, layers};
use probe::{Event, Probe, growth_bytes, moved, take_events};

type Device = Probe<Flex>;
type Plain = Autodiff<Device>;
type B = Sharded<Plain>;

const LAYERS: usize = 12;
const WIDTH: usize = 16;
const LAYER_BYTES: usize = WIDTH * WIDTH * 4;
const MODEL_BYTES: usize = LAYERS * LAYER_BYTES;
/// One is being reduced, one waits, one is brought.
const BUCKETS_UNDER_WAY: usize = 3;

/// Events are those of the process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    take_events();
    turn
}

fn model<B: Backend>() -> Model<B> {
    layers(LAYERS, WIDTH, 0.5)
}

fn loss<B: Backend>(model: &Model<B>, step: usize) -> Tensor<B, 1> {
    let x = Tensor::full([2, WIDTH], 0.5 + step as f32 / 8.0, &Default::default());
    layers::loss(model, x)
}

/// The bits of all weights.
fn weights<B: Backend>(model: &Model<B>) -> Vec<u32> {
    layers::weights(model)
        .into_iter()
        .map(f32::to_bits)
        .collect()
}

/// A layer fills a bucket.
fn on_host() -> OffloadedAdamW {
    let config = OffloadConfig {
        bucket_elements: WIDTH * WIDTH,
        ..OffloadConfig::new(HostAdamWConfig::default())
    };
    config.init().unwrap()
}

fn sharding(stage: Stage, gradients: Memory) -> ZeroSettings {
    ZeroSettings {
        bucket_elements: WIDTH * WIDTH,
        gradients,
        ..ZeroSettings::stage(stage)
    }
}

fn step<B, O>(optimizer: &mut O, model: Model<B>, gradients: B::Gradients) -> Model<B>
where
    B: AutodiffBackend,
    Model<B>: AutodiffModule<B>,
    O: Optimizer<Model<B>, B>,
{
    let gradients = GradientsParams::from_grads(gradients, &model);
    optimizer.step(0.01, model, gradients)
}

/// The positions of whole gradients that arrived on the host, and of the last computed operation.
fn order(events: &[Event]) -> (Vec<usize>, usize) {
    let places = |is: &dyn Fn(&Event) -> bool| {
        let found = events.iter().enumerate().filter(|(_, event)| is(event));
        found.map(|(index, _)| index).collect::<Vec<_>>()
    };
    let computed = places(&|event| matches!(event, Event::Computed(_)));
    let down = places(&|event| *event == Event::Down(LAYER_BYTES));
    (down, *computed.last().unwrap())
}

#[test]
fn gradients_arrive_while_backward_computes() {
    let _turn = turn();
    // On a backend that hooks nothing they wait for the step.
    let mut optimizer = on_host();
    let mut before = model::<Plain>();
    for _ in 0..2 {
        let loss = loss(&before, 0);
        take_events();
        let gradients = loss.backward();
        assert_eq!(moved(&take_events()), (0, 0));
        before = step(&mut optimizer, before, gradients);
    }

    let mut optimizer = on_host();
    let mut after = model::<B>();
    optimizer.prepare(&after);
    for index in 0..2 {
        let loss = loss(&after, 0);
        take_events();
        let gradients = loss.backward();
        let (down, last_computed) = order(&take_events());
        assert_eq!(down.len(), LAYERS);
        // The bucket that is brought last comes after all operations, and two before it may.
        let early = down.iter().filter(|place| **place < last_computed).count();
        assert!(early >= LAYERS - BUCKETS_UNDER_WAY, "{early} of {LAYERS}");
        after = step(&mut optimizer, after, gradients);
        let (down, _) = moved(&take_events());
        // The parameters, in the first step only.
        assert_eq!(down, if index == 0 { MODEL_BYTES } else { 0 });
    }
    assert_eq!(weights(&before), weights(&after));
}

/// Stages 0 and 1 reduce gradients at the step: backward reads nothing from the device and calls no
/// other rank.
#[test]
fn backward_waits_for_nothing_where_gradients_are_reduced_at_the_step() {
    let _turn = turn();
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        ThreadGroup::spawn(2, GroupOptions::default(), |group| {
            let group: Arc<dyn ProcessGroup> = Arc::new(group);
            let sgd = SgdConfig::new().init();
            let settings = sharding(stage, Memory::Device);
            let update = Update::new(sgd).reduce(settings, group.clone());
            let mut update = update.unwrap();
            let mut model = update.prepare(model::<B>()).unwrap();
            for at in 0..3 {
                let loss = loss(&model, at);
                let before = group.traffic();
                group.barrier("before backward").unwrap();
                if group.rank() == 0 {
                    take_events();
                }
                group.barrier("backward").unwrap();
                let gradients = loss.backward();
                group.barrier("after backward").unwrap();
                assert_eq!(moved(&take_events()), (0, 0), "{stage:?}");
                let calls = group.traffic().total().calls - before.total().calls;
                assert_eq!(calls, 3, "{stage:?}: only those of this test");
                group.barrier("looked").unwrap();
                model = step(&mut update, model, gradients);
            }
        })
        .unwrap();
    }
}

#[test]
fn the_device_holds_a_few_buckets_of_gradients() {
    let _turn = turn();
    fn grown<B: AutodiffBackend>() -> usize
    where
        Model<B>: AutodiffModule<B>,
    {
        let (mut model, mut optimizer) = (model::<B>(), on_host());
        optimizer.prepare(&model);
        let mut most = 0;
        for index in 0..3 {
            let loss = loss(&model, index);
            let (grown, gradients) = growth_bytes(|| loss.backward());
            most = most.max(grown);
            model = step(&mut optimizer, model, gradients);
        }
        most
    }
    let (plain, landed) = (grown::<Plain>(), grown::<B>());
    println!(
        "{MODEL_BYTES} bytes of parameters: backward takes {plain}, and {landed} with gradients on the host"
    );
    // What the graph holds goes while gradients come.
    assert!(plain >= MODEL_BYTES * 2 / 3, "{plain} of {MODEL_BYTES}");
    assert!(
        landed <= BUCKETS_UNDER_WAY * LAYER_BYTES,
        "{landed}, a layer has {LAYER_BYTES}"
    );
}

/// Eight micro-batches.
fn accumulate<B, O>(mut optimizer: O) -> Vec<u32>
where
    B: AutodiffBackend,
    Model<B>: AutodiffModule<B>,
    O: Optimizer<Model<B>, B>,
{
    let mut model = model::<B>();
    for index in 0..8 {
        let gradients = loss(&model, index).backward();
        model = step(&mut optimizer, model, gradients);
    }
    weights(&model)
}

fn in_windows<B: AutodiffBackend>(windows: AccumConfig) -> Update<Model<B>, B>
where
    Model<B>: AutodiffModule<B>,
{
    Update::new(on_host()).accumulate(windows).unwrap()
}

#[test]
fn micro_batches_are_added_up_on_the_host_to_the_same_bits() {
    let _turn = turn();
    for window in [1, 2, 4] {
        let windows = AccumConfig::mean(window);
        let plain = accumulate::<Plain, _>(in_windows(windows));
        assert_eq!(plain, accumulate::<B, _>(in_windows(windows)), "{window}");
        for stage in Stage::WITH_WHOLE_PARAMETERS {
            for memory in [Memory::Device, Memory::Host] {
                let group = Arc::new(SingleRank::new());
                let update = Update::new(on_host()).reduce(sharding(stage, memory), group);
                let mut update = update.unwrap().accumulate(windows).unwrap();
                update.prepare(model::<B>()).unwrap();
                assert_eq!(plain, accumulate::<B, _>(update), "{stage}");
            }
        }
    }

    // Nothing but the update goes over the bus.
    let mut optimizer = in_windows(AccumConfig::mean(2));
    let mut model = model::<B>();
    for index in 0..8 {
        let gradients = loss(&model, index).backward();
        take_events();
        model = step(&mut optimizer, model, gradients);
        let (down, up) = moved(&take_events());
        if index > 2 {
            let expected = if index % 2 == 1 { MODEL_BYTES } else { 0 };
            assert_eq!((down, up), (0, expected), "micro-batch {index}");
        }
    }
}

#[test]
fn a_scaler_sees_gradients_that_are_on_the_host() {
    let _turn = turn();
    type Low<A> = Autocast<A, F16>;
    fn train<B: AutodiffBackend>() -> (u64, Vec<u32>)
    where
        Model<B>: AutodiffModule<B>,
    {
        let config = GradScalerConfig {
            init_scale: 1024.0,
            ..Default::default()
        };
        let scaler = GradScaler::new(config).unwrap();
        let update = Update::<Model<B>, B>::new(on_host());
        let mut optimizer = update.scale(scaler.clone()).unwrap();
        let mut model = model::<B>();
        for index in 0..6 {
            let mut loss = loss(&model, index);
            if index == 3 {
                loss = loss * f32::INFINITY;
            }
            model = step(&mut optimizer, model, loss.backward());
        }
        (scaler.skipped_steps(), weights(&model))
    }
    let plain = train::<Low<Plain>>();
    assert_eq!(plain.0, 1);
    assert_eq!(plain, train::<Low<B>>());
}

/// Bytes down and up of all ranks in a step, its backward pass included; and the weights.
fn traffic<O>(
    ranks: usize,
    sharding: &ZeroSettings,
    optimizer: impl Fn() -> O + Sync,
) -> ((usize, usize), Vec<u32>)
where
    O: Optimizer<ParameterShards<B>, B> + 'static,
{
    let _turn = turn();
    let results = ThreadGroup::spawn(ranks, GroupOptions::default(), |group| {
        let group: Arc<dyn ProcessGroup> = Arc::new(group);
        let mut update = Update::new(optimizer()).reduce(sharding.clone(), group.clone())?;
        let mut model = update.prepare(model::<B>())?;
        let mut bytes = (0, 0);
        for index in 0..3 {
            let loss = loss(&model, index + group.rank());
            group.barrier("before")?;
            if group.rank() == 0 {
                take_events();
            }
            group.barrier("begin")?;
            model = step(&mut update, model, loss.backward());
            group.barrier("end")?;
            if group.rank() == 0 {
                bytes = moved(&take_events());
            }
            group.barrier("counted")?;
        }
        Ok::<_, UpdateError>((bytes, weights(&model)))
    });
    results.unwrap().remove(0).unwrap()
}

#[test]
fn reduced_pieces_stay_on_the_host() {
    for ranks in [2, 3] {
        for stage in Stage::WITH_WHOLE_PARAMETERS {
            let (before, expected) = traffic(ranks, &sharding(stage, Memory::Device), on_host);
            let (after, found) = traffic(ranks, &sharding(stage, Memory::Host), on_host);
            assert_eq!(expected, found, "{ranks} ranks, {stage}");
            println!(
                "{ranks} ranks, {stage}: {before:?} bytes down and up, {after:?} with gradients on the host"
            );
            // Whole in stage 0.
            let held = match stage {
                Stage::DataParallel => ranks * MODEL_BYTES,
                _ => MODEL_BYTES,
            };
            // Neither up to the device nor down again to the update. On the device sums told what
            // is finite.
            let (down, up) = (before.0 - after.0, before.1 - after.1);
            assert!((held..=held + ranks * LAYERS * 4).contains(&down), "{down}");
            assert_eq!(up, held, "{ranks} ranks, {stage}");
        }
    }
}

#[test]
fn updated_pieces_are_gathered_from_the_host() {
    for ranks in [2, 3] {
        for stage in [Stage::OptimizerState, Stage::Gradients] {
            for partition in [Partition::Flat, Partition::Whole] {
                let sharding = ZeroSettings {
                    partition,
                    ..sharding(stage, Memory::Host)
                };
                let ((down, up), _) = traffic(ranks, &sharding, on_host);
                let what = format!("{ranks} ranks, {stage}, {partition:?}: {down} {up}");
                // Each rank's gradients.
                assert_eq!(down, ranks * MODEL_BYTES, "{what}");
                // The parameters, on each rank.
                assert_eq!(up, ranks * MODEL_BYTES, "{what}");
            }
        }
    }
}

/// Halves what the optimizer in it has updated.
#[derive(Clone)]
struct Halves<O>(O);

impl<O: Optimizer<ParameterShards<B>, B>> Optimizer<ParameterShards<B>, B> for Halves<O> {
    type Record = O::Record;

    fn step(
        &mut self,
        lr: f64,
        module: ParameterShards<B>,
        grads: GradientsParams,
    ) -> ParameterShards<B> {
        struct Half;
        impl ModuleMapper<B> for Half {
            fn map_float<const D: usize>(
                &mut self,
                param: Param<Tensor<B, D>>,
            ) -> Param<Tensor<B, D>> {
                param.map(|tensor| tensor * 0.5)
            }
        }
        self.0.step(lr, module, grads).map(&mut Half)
    }

    fn step_multi(
        &mut self,
        lr: f64,
        module: ParameterShards<B>,
        grads: MultiGradientsParams,
    ) -> ParameterShards<B> {
        self.0.step_multi(lr, module, grads)
    }

    fn to_record(&self) -> Self::Record {
        self.0.to_record()
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self(self.0.load_record(record))
    }
}

#[test]
fn who_changes_updated_pieces_finds_them() {
    let run = |stage| traffic(2, &sharding(stage, Memory::Host), || Halves(on_host()));
    // In stage 0 nothing is gathered.
    let (_, expected) = run(Stage::DataParallel);
    for stage in [Stage::OptimizerState, Stage::Gradients] {
        let ((_, up), found) = run(stage);
        assert!(expected == found, "{stage}");
        assert_eq!(up, 3 * MODEL_BYTES, "pieces too: {stage}");
    }
}
