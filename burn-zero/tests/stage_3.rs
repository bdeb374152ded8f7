//! Stage 3 over ranks: the bits of stage 2, each parameter gathered where it is used, and what
//! ranks hold and send for it. In its own process, as it counts bytes.

#[path = "support/layers.rs"]
mod layers;
#[allow(dead_code, reason = "its events are for other tests")]
#[path = "support/probe.rs"]
mod probe;

use std::fs;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard};

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module, Param, ParamId};
use burn::nn::{Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{Autocast, Bf16};
use burn_checkpoint::{Remat, RematStats, checkpoint, checkpoint_units};
use burn_flex::Flex;
use burn_ranks::{Operation, RanksError};
use burn_store::{ModuleSnapshot, SafetensorsStore};
use burn_update::{Update, UpdateError};
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{
    GroupFault, HostAdamWConfig, Memory, ModelStates, OffloadConfig, ParameterShards, Partition,
    ProcessGroup, RankReduction, RecordFault, ReduceOverRanks, Sharded, Stage, ThreadGroup,
    Training, ZeroConfig, ZeroError, ZeroSettings, estimate, offload_parameters, read_on_use,
    shard_parameters,
};
use layers::layers;
use peak_alloc::PeakAlloc;
use probe::{Probe, growth_bytes, live_bytes, moved, own_growth_bytes, take_events};

type B = Sharded<Autodiff<Remat<Probe<Flex>>>>;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const STEPS: usize = 3;
const WIDTH: usize = 64;

/// Bytes are those of the process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Blocks between two layers of which the second has the first's weight; a block's bias is frozen,
/// one is not used.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    blocks: Vec<Linear<B>>,
    last: Linear<B>,
    unused: Linear<B>,
}

const FEATURES: usize = 6;

impl<B: Backend> Net<B> {
    fn new() -> Self {
        let mut drawn = 0;
        let mut values = |count: usize| {
            drawn += 1;
            let values =
                (0..count).map(|index| ((index * 37 + drawn * 11) % 23) as f32 / 23.0 - 0.5);
            Tensor::<B, 1>::from_data(values.collect::<Vec<_>>().as_slice(), &Default::default())
        };
        let mut linear = || {
            let mut linear = LinearConfig::new(FEATURES, FEATURES).init(&Default::default());
            let weight = values(FEATURES * FEATURES).reshape([FEATURES, FEATURES]);
            linear.weight = Param::from_tensor(weight);
            linear.bias = Some(Param::from_tensor(values(FEATURES)));
            linear
        };
        let (first, mut last): (Linear<B>, Linear<B>) = (linear(), linear());
        let mut blocks: Vec<Linear<B>> = (0..3).map(|_| linear()).collect();
        last.weight = first.weight.clone();
        blocks[1].bias = blocks[1]
            .bias
            .take()
            .map(|bias| bias.set_require_grad(false));
        Self {
            first,
            blocks,
            last,
            unused: linear(),
        }
    }

    fn loss(&self, x: Tensor<B, 2>, scopes: Scopes) -> Tensor<B, 1> {
        let x = self.first.forward(x);
        let x = self.blocks.iter().fold(x, |x, block| {
            let forward = || block.forward(x).tanh().sin();
            match scopes {
                Scopes::ByHand => checkpoint(forward),
                Scopes::None | Scopes::Units | Scopes::UnitsOfPrepared => forward(),
            }
        });
        self.last.forward(x).square().mean()
    }
}

/// An update over the ranks of `group`.
fn over_ranks<M: AutodiffModule<A> + 'static, A: AutodiffBackend>(
    optimizer: impl Optimizer<ParameterShards<A>, A> + 'static,
    group: Arc<dyn ProcessGroup>,
    settings: ZeroSettings,
) -> Result<Update<M, A>, UpdateError> {
    Update::new(optimizer).reduce(settings, group)
}

/// As [`over_ranks`], with its handle.
fn reduced<M: AutodiffModule<B> + 'static>(
    optimizer: impl Optimizer<ParameterShards<B>, B> + 'static,
    group: Arc<dyn ProcessGroup>,
    settings: ZeroSettings,
) -> Result<(Update<M, B>, RankReduction), UpdateError> {
    let reduction = RankReduction::new(settings, group)?;
    let update = Update::new(optimizer).reduce_by(&reduction)?;
    Ok((update, reduction))
}

/// Of the blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scopes {
    None,
    ByHand,
    /// Found by the paths of the parameters, before the ranks prepare the model.
    Units,
    /// As `Units`, after the ranks have prepared it.
    UnitsOfPrepared,
}

/// What a rank trains.
#[derive(PartialEq)]
struct Trained {
    losses: Vec<u32>,
    parameters: Vec<u32>,
}

fn bits<B: Backend, M: Module<B>>(module: &M) -> Vec<u32> {
    struct Collect(Vec<u32>);
    impl<B: Backend> burn::module::ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            let values = param.val().into_data().into_vec::<f32>().unwrap();
            self.0.extend(values.into_iter().map(f32::to_bits));
        }
    }
    let mut collect = Collect(Vec::new());
    module.visit(&mut collect);
    collect.0
}

/// The bits of the losses of each step and of the trained parameters, on each rank.
fn train<O>(
    ranks: usize,
    settings: &ZeroSettings,
    optimizer: impl Fn() -> O + Sync,
    scopes: Scopes,
) -> Vec<Trained>
where
    O: Optimizer<ParameterShards<B>, B> + 'static,
{
    let start = Mutex::new(Net::<B>::new());
    let trained = ThreadGroup::spawn(ranks, Default::default(), |group| {
        let rank = group.rank();
        let mut model = start.lock().unwrap().clone();
        let mut update = over_ranks(optimizer(), Arc::new(group), settings.clone())?;
        if scopes == Scopes::Units {
            (model, _) = checkpoint_units(model).expect("blocks");
        }
        model = update.prepare(model)?;
        if scopes == Scopes::UnitsOfPrepared {
            (model, _) = checkpoint_units(model).expect("blocks");
        }
        let mut losses = Vec::new();
        for step in 0..STEPS {
            // Windows of one and of two micro-batches.
            let mut sum = burn::optim::GradientsAccumulator::new();
            for micro in 0..1 + step % 2 {
                let of_rank = (rank * 3 + step + micro) as f64 * 0.1;
                let x = Tensor::full([2, FEATURES], of_rank, &Default::default());
                let before = RematStats::of_thread().replayed_operations;
                let loss = model.loss(x, scopes);
                losses.extend(loss.clone().into_data().into_vec::<f32>().unwrap());
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                let replayed = RematStats::of_thread().replayed_operations - before;
                assert_eq!(
                    replayed > 0,
                    scopes != Scopes::None,
                    "{scopes:?}, step {step}"
                );
                sum.accumulate(&model, gradients);
            }
            model = update.step(0.05, model, sum.grads())?;
        }
        let losses = losses.into_iter().map(f32::to_bits).collect();
        let valid = bits(&model.valid());
        let parameters = bits(&model);
        assert!(
            valid == parameters,
            "the module for validation has them too"
        );
        Ok::<_, UpdateError>(Trained { losses, parameters })
    });
    let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
    trained.expect("ranks agree")
}

#[test]
fn bits_are_those_of_stage_2() {
    let _turn = turn();
    for ranks in [2, 3] {
        // Units smaller and larger than a bucket.
        for bucket_elements in [16, 1 << 20] {
            let settings = |stage| ZeroSettings {
                bucket_elements,
                ..ZeroSettings::stage(stage)
            };
            let adam = || AdamWConfig::new().init();
            let expected = train(ranks, &settings(Stage::Gradients), adam, Scopes::None);
            assert_ne!(
                expected[0].losses, expected[1].losses,
                "ranks have their own data"
            );
            for (scopes, stage) in [
                (Scopes::None, Stage::Parameters),
                (Scopes::ByHand, Stage::Gradients),
                (Scopes::ByHand, Stage::Parameters),
                (Scopes::Units, Stage::Gradients),
                (Scopes::Units, Stage::Parameters),
                (Scopes::UnitsOfPrepared, Stage::Parameters),
            ] {
                let found = train(ranks, &settings(stage), adam, scopes);
                assert!(
                    expected == found,
                    "{ranks} ranks, {bucket_elements}, {scopes:?}, {stage:?}"
                );
            }
        }
    }
}

#[test]
fn scopes_of_units_change_no_bit_where_parameters_are_whole() {
    let _turn = turn();
    let adam = || AdamWConfig::new().init();
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        let settings = ZeroSettings::stage(stage);
        let expected = train(2, &settings, adam, Scopes::None);
        let found = train(2, &settings, adam, Scopes::Units);
        assert!(found == expected, "{stage:?}");
    }
}

#[test]
fn so_they_are_with_whole_shards_and_with_the_optimizer_on_the_host() {
    let _turn = turn();
    let whole = |stage| ZeroSettings {
        partition: Partition::Whole,
        ..ZeroSettings::stage(stage)
    };
    let adam = || AdamWConfig::new().init();
    let expected = train(2, &whole(Stage::Gradients), adam, Scopes::None);
    assert!(expected == train(2, &whole(Stage::Parameters), adam, Scopes::None));

    let host = |stage| ZeroSettings {
        gradients: Memory::Host,
        bucket_elements: 16,
        ..ZeroSettings::stage(stage)
    };
    let on_host = || {
        OffloadConfig::new(HostAdamWConfig::default())
            .init()
            .expect("valid")
    };
    let expected = train(3, &host(Stage::Gradients), on_host, Scopes::ByHand);
    for scopes in [Scopes::ByHand, Scopes::Units] {
        assert!(expected == train(3, &host(Stage::Parameters), on_host, scopes));
    }
}

#[test]
fn so_they_are_with_shards_on_the_device() {
    let _turn = turn();
    let adam = || AdamWConfig::new().init();
    for partition in [Partition::Flat, Partition::Whole] {
        let settings = |stage| ZeroSettings {
            partition,
            bucket_elements: 16,
            shards: Memory::Device,
            ..ZeroSettings::stage(stage)
        };
        let expected = train(3, &settings(Stage::Gradients), adam, Scopes::ByHand);
        assert!(expected == train(3, &settings(Stage::Parameters), adam, Scopes::ByHand));
    }
    let host = |stage| ZeroSettings {
        gradients: Memory::Host,
        shards: Memory::Device,
        ..ZeroSettings::stage(stage)
    };
    let on_host = || {
        OffloadConfig::new(HostAdamWConfig::default())
            .init()
            .expect("valid")
    };
    let expected = train(2, &host(Stage::Gradients), on_host, Scopes::None);
    assert!(expected == train(2, &host(Stage::Parameters), on_host, Scopes::None));
}

/// What all ranks hold of a model whose first layers are trained, and what an update moves.
#[derive(Debug)]
struct Held {
    device_bytes: usize,
    host_bytes: usize,
    /// By the update, to the host and from it.
    moved: (usize, usize),
}

#[test]
fn shards_are_held_where_the_setting_puts_them() {
    let _turn = turn();
    const RANKS: usize = 2;
    const LAYERS: usize = 8;
    const WIDTH: usize = 256;
    const LAYER_BYTES: usize = WIDTH * WIDTH * 4;
    let held = |shards| {
        let held = ThreadGroup::spawn(RANKS, Default::default(), |group| {
            let group = Arc::new(group);
            let settings = ZeroSettings {
                shards,
                ..ZeroSettings::stage(Stage::Parameters)
            };
            let sgd = SgdConfig::new().init();
            let mut update = over_ranks(sgd, group.clone(), settings)?;
            let model = update.prepare(frozen_but(layers::<B>(LAYERS, WIDTH, 0.2), 0))?;
            let x = Tensor::ones([2, WIDTH], &Default::default());
            let gradients = layers::loss(&model, x).backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            group.barrier("backward")?;
            take_events();
            group.barrier("an update")?;
            let model = update.step(0.01, model, gradients)?;
            group.barrier("updated")?;
            let moved = moved(&take_events());
            group.barrier("taken")?;
            let held = (live_bytes(), HEAP.current_usage());
            group.barrier("read")?;
            drop((model, update));
            group.barrier("dropped")?;
            let device_bytes = held.0 - live_bytes();
            // What the backend has is in the heap too.
            let host_bytes = held.1 - HEAP.current_usage() - device_bytes;
            group.barrier("read again")?;
            Ok::<_, UpdateError>(Held {
                device_bytes,
                host_bytes,
                moved,
            })
        });
        let held = held.expect("ranks end").into_iter();
        let held: Result<Vec<_>, _> = held.collect();
        let mut held = held.expect("ranks agree");
        // Of the ranks that take the events one finds them.
        held.sort_by_key(|held| held.moved);
        held.pop().expect("two ranks")
    };
    let [host, device] = [Memory::Host, Memory::Device].map(held);
    println!("{host:?}, {device:?}");
    let all = LAYERS * LAYER_BYTES;
    assert_eq!([host.device_bytes, device.device_bytes], [0, all]);
    // Each rank's part, as it is said before.
    let model = frozen_but(layers::<B>(LAYERS, WIDTH, 0.2), 0);
    let config = ZeroConfig {
        stage: Stage::Parameters,
        shards: Memory::Device,
        ..ZeroConfig::default()
    };
    let said = estimate(&ModelStates::of::<B, _>(&model), &config, RANKS);
    assert_eq!(RANKS * said.parameter_shard_bytes as usize, all);
    assert!(
        (all..all + LAYER_BYTES / 4).contains(&host.host_bytes),
        "{host:?}"
    );
    assert!(device.host_bytes < LAYER_BYTES / 4, "{device:?}");
    // The trained layer goes to the device and comes back, beside its gradient.
    assert_eq!(host.moved.0 - device.moved.0, LAYER_BYTES);
    assert_eq!(host.moved.1 - device.moved.1, LAYER_BYTES);
}

#[test]
fn a_rank_sends_its_shard_in_forward_and_in_backward_and_holds_one_parameter() {
    let _turn = turn();
    const LAYERS: usize = 8;
    const LAYER_BYTES: usize = WIDTH * WIDTH * 4;
    const RANKS: usize = 2;
    const ACTIVATION_BYTES: usize = 4 * LAYERS * 2 * WIDTH * 4;
    let found = ThreadGroup::spawn(RANKS, Default::default(), |group| {
        let group = Arc::new(group);
        let settings = ZeroSettings {
            bucket_elements: WIDTH * WIDTH,
            ..ZeroSettings::stage(Stage::Parameters)
        };
        let adam = AdamWConfig::new().init();
        let mut update = over_ranks(adam, group.clone(), settings)?;
        let mut model = update.prepare(layers::<B>(LAYERS, WIDTH, 0.2))?;
        let sent = |operation| group.traffic().of(operation).elements;
        let mut held = Vec::new();
        for _ in 0..2 {
            let before = (sent(Operation::AllGather), sent(Operation::ReduceScatter));
            let forward = || {
                group.barrier("before")?;
                let x = Tensor::full([2, WIDTH], 0.5, &Default::default());
                let loss = layers::loss(&model, x);
                group.barrier("forward")?;
                Ok::<_, UpdateError>(loss)
            };
            let (bytes, loss) = own_growth_bytes(forward);
            held.push(bytes);
            let gradients = GradientsParams::from_grads(loss?.backward(), &model);
            model = update.step(0.01, model, gradients)?;
            let gathered = sent(Operation::AllGather) - before.0;
            let reduced = sent(Operation::ReduceScatter) - before.1;
            // The last layer stays gathered from forward to backward, which does not use the first.
            let layer = (WIDTH * WIDTH / RANKS * (RANKS - 1)) as u64;
            assert_eq!(gathered, (2 * LAYERS - 2) as u64 * layer);
            assert_eq!(reduced, LAYERS as u64 * layer);
        }
        Ok::<_, UpdateError>(held)
    });
    for held in found.expect("ranks end") {
        for bytes in held.expect("ranks agree") {
            // The probe counts a view as a tensor: a parameter and its view, while one is made of
            // the other.
            let most = 2 * LAYER_BYTES + ACTIVATION_BYTES;
            assert!(bytes <= most, "{bytes} of {most}");
        }
    }
}

/// A scope of one unit computes it again and then its gradients while it is gathered: what is sent
/// is what `estimate` says. A scope of several units gathers them once more.
#[test]
fn scopes_of_one_unit_send_what_is_estimated() {
    let _turn = turn();
    const LAYERS: usize = 8;
    const RANKS: usize = 2;
    let gathers = |scope: usize| {
        let sent = ThreadGroup::spawn(RANKS, Default::default(), |group| {
            let group = Arc::new(group);
            let adam = AdamWConfig::new().init();
            let settings = ZeroSettings::stage(Stage::Parameters);
            let mut update = over_ranks(adam, group.clone(), settings)?;
            let mut model = update.prepare(layers::<B>(LAYERS, WIDTH, 0.2))?;
            let sent = || group.traffic().of(Operation::AllGather).elements;
            let mut each = Vec::new();
            for _ in 0..3 {
                let before = sent();
                let x = Tensor::<B, 2>::full([2, WIDTH], 0.5, &Default::default());
                let y = model.chunks(scope).fold(x, |x, layers| {
                    checkpoint(|| {
                        layers
                            .iter()
                            .fold(x, |x, layer: &Linear<B>| layer.forward(x).tanh())
                    })
                });
                let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
                model = update.step(0.01, model, gradients)?;
                each.push(sent() - before);
            }
            Ok::<_, UpdateError>(each)
        });
        let sent = sent.expect("ranks end").swap_remove(0);
        let layer = (WIDTH * WIDTH / RANKS * (RANKS - 1)) as u64;
        let sent = sent.expect("ranks agree").into_iter();
        sent.map(|sent| sent / layer).collect::<Vec<_>>()
    };
    let model = ModelStates::of::<B, _>(&layers(LAYERS, WIDTH, 0.2));
    let config = ZeroConfig {
        stage: Stage::Parameters,
        ..ZeroConfig::default()
    };
    let said = estimate(&model, &config, RANKS).sent_elements;
    assert_eq!(said, 3 * model.elements / RANKS as u64);
    let units = LAYERS as u64;
    assert_eq!(gathers(1), [2 * units; 3]);
    // Of two in a scope the first is computed again, makes room for the second, and is gathered for
    // its gradients.
    let more = gathers(2);
    assert!(
        more.iter()
            .all(|sent| (2 * units + 1..=3 * units).contains(sent)),
        "{more:?}"
    );
}

#[test]
fn the_next_unit_is_gathered_while_one_computes_and_two_are_held() {
    let _turn = turn();
    gathered_ahead(|layers| layers);
}

#[test]
fn so_it_is_when_it_is_frozen() {
    let _turn = turn();
    gathered_ahead(|layers| frozen_but(layers, 0));
}

/// The next unit is gathered while one computes, of the layers that `freeze` returns.
fn gathered_ahead(freeze: impl Fn(Vec<Linear<B>>) -> Vec<Linear<B>> + Sync) {
    const RANKS: usize = 2;
    const WIDTH: usize = 256;
    const LAYER_BYTES: usize = WIDTH * WIDTH * 4;
    let found = ThreadGroup::spawn(RANKS, Default::default(), |group| {
        let group = Arc::new(group);
        let adam = AdamWConfig::new().init();
        let settings = ZeroSettings {
            bucket_elements: WIDTH * WIDTH,
            ..ZeroSettings::stage(Stage::Parameters)
        };
        let mut update = over_ranks(adam, group.clone(), settings)?;
        let mut model = update.prepare(freeze(layers::<B>(4, WIDTH, 0.2)))?;
        let sent = || group.traffic().of(Operation::AllGather).elements;
        let mut found = Vec::new();
        for _ in 0..3 {
            let mut x = Tensor::<B, 2>::full([2, WIDTH], 0.5, &Default::default());
            group.barrier("before")?;
            let (before, gathered) = (HEAP.current_usage(), sent());
            group.barrier("begin")?;
            let mut held = Vec::new();
            for layer in &model {
                x = layer.forward(x).tanh();
                // Jobs run one after the other: what is gathered ahead has arrived.
                group.barrier("a layer")?;
                let units = HEAP.current_usage().saturating_sub(before) / RANKS;
                held.push((sent() - gathered, units));
                group.barrier("read")?;
            }
            let gradients = GradientsParams::from_grads(x.mean().backward(), &model);
            model = update.step(0.01, model, gradients)?;
            found.push(held);
        }
        Ok::<_, UpdateError>(found)
    });
    let part = (WIDTH * WIDTH / RANKS) as u64;
    for found in found.expect("ranks end") {
        for (step, held) in found.expect("ranks agree").into_iter().enumerate() {
            for (layer, (sent, bytes)) in held.into_iter().enumerate() {
                // The first step records the order, and allocates what stays. The last layer's
                // successor is the one before it, in backward.
                let ahead = u64::from(step > 0);
                assert_eq!(sent, (layer as u64 + 1 + ahead) * part, "step {step}");
                let two = 2 * LAYER_BYTES..2 * LAYER_BYTES + LAYER_BYTES / 4;
                assert!(step == 0 || two.contains(&bytes), "{bytes} in step {step}");
            }
        }
    }
}

#[test]
fn units_are_those_of_a_function_of_the_path() {
    let _turn = turn();
    type Choose = fn(&str) -> String;
    const LAYERS: usize = 4;
    // The weights after two steps, and the elements that the second gathered; `None` leaves the
    // default.
    let train = |units: [Option<Choose>; 2]| {
        let found = ThreadGroup::spawn(2, Default::default(), |group| {
            let group = Arc::new(group);
            let adam = AdamWConfig::new().init();
            let settings = ZeroSettings::stage(Stage::Parameters);
            let mut reduction = RankReduction::new(settings, group.clone())?;
            if let Some(unit) = units[group.rank()] {
                reduction = reduction.with_units(unit);
            }
            let mut update = Update::new(adam).reduce_by(&reduction)?;
            let mut model = update.prepare(layers::<B>(LAYERS, 8, 0.2))?;
            let gathered = || group.traffic().of(Operation::AllGather).elements;
            let mut before = 0;
            for _ in 0..2 {
                before = gathered();
                let x = Tensor::ones([2, 8], &Default::default());
                let gradients = layers::loss(&model, x).backward();
                let gradients = GradientsParams::from_grads(gradients, &model);
                model = update.step(0.05, model, gradients)?;
            }
            let gathered = (gathered() - before) / (8 * 8 / 2);
            Ok::<_, UpdateError>((layers::weights(&model), gathered))
        });
        let found: Result<Vec<_>, _> = found.expect("ranks end").into_iter().collect();
        found.map(|mut found| found.swap_remove(0))
    };
    let (expected, gathered) = train([None; 2]).expect("ranks agree");
    assert_eq!(gathered as usize, 2 * LAYERS - 2);
    // Never left in a step.
    let (found, gathered) = train([Some(|_| "all".into()); 2]).expect("ranks agree");
    assert_eq!(gathered as usize, LAYERS);
    assert_eq!(found, expected);
    match train([None, Some(|_| "all".into())]) {
        Err(UpdateError::Ranks(RanksError::Disagreement {
            label, peer_value, ..
        })) => {
            assert_eq!(label, "units of the parameters, entry 0");
            assert!(peer_value.ends_with(" in all") || peer_value.ends_with(" in 0"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn under_autocast_units_are_gathered_in_the_low_type_with_the_same_bits() {
    let _turn = turn();
    type Low = Autocast<B, Bf16>;
    const LAYERS: usize = 4;
    let run = |stage, is_frozen: bool, shards| {
        let trained = ThreadGroup::spawn(2, Default::default(), |group| {
            let group = Arc::new(group);
            let adam = AdamWConfig::new().init();
            let settings = ZeroSettings {
                bucket_elements: WIDTH * WIDTH,
                shards,
                ..ZeroSettings::stage(stage)
            };
            let mut update = over_ranks(adam, group.clone(), settings)?;
            let model = layers::<Low>(LAYERS, WIDTH, 0.2);
            let model = if is_frozen {
                frozen_but(model, 0)
            } else {
                model
            };
            let mut model = update.prepare(model)?;
            let sent = || group.traffic().of(Operation::AllGather).data_bytes;
            let (mut losses, mut gathered) = (Vec::new(), Vec::new());
            for step in 0..STEPS {
                let before = sent();
                let x = 0.1 * (step + group.rank()) as f64;
                let loss = layers::loss(&model, Tensor::full([2, WIDTH], x, &Default::default()));
                losses.push(loss.clone().into_data());
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = update.step(0.01, model, gradients)?;
                gathered.push(sent() - before);
            }
            // In their own type, though they are held in the low one.
            Ok::<_, UpdateError>((losses, bits(&model), gathered))
        });
        let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
        trained.expect("ranks agree")
    };
    // Each but the first in forward and in backward; the last stays in between.
    let uses = (2 * LAYERS - 2) as u64;
    let bytes = uses * (WIDTH * WIDTH / 2 * 4) as u64;
    let cases = [false, true]
        .map(|is_frozen| [Memory::Host, Memory::Device].map(|shards| (is_frozen, shards)));
    for (is_frozen, shards) in cases.into_iter().flatten() {
        let expected = run(Stage::DataParallel, is_frozen, shards);
        let found = run(Stage::Parameters, is_frozen, shards);
        for (expected, (losses, parameters, gathered)) in expected.into_iter().zip(found) {
            assert_eq!(expected.0, losses);
            assert!(expected.1 == parameters);
            // The first step tells in which type they are used.
            assert_eq!(gathered, [bytes, bytes / 2, bytes / 2]);
        }
    }
}

#[test]
fn ranks_that_use_parameters_in_another_order_are_told() {
    let _turn = turn();
    let swap = |model: &mut Vec<_>| model.swap(0, 1);
    let start = ", part 0, after the start";
    told(
        0,
        swap,
        [&format!("unit `0`{start}"), &format!("unit `1`{start}")],
    );
    let step = ", part 0, after step 1, lr 0.05";
    told(
        1,
        swap,
        [&format!("unit `0`{step}"), &format!("unit `1`{step}")],
    );
}

#[test]
fn so_is_a_branch_that_one_rank_takes() {
    let _turn = turn();
    let branch = |model: &mut Vec<_>| drop(model.remove(1));
    let start = ", part 0, after the start";
    told(
        0,
        branch,
        [&format!("unit `1`{start}"), &format!("unit `2`{start}")],
    );
    // One rank gathers the unit ahead that the other uses already.
    let step = "after step 1, lr 0.05";
    let ahead = format!("unit `2`, part 0, while unit `1` computes, {step}");
    told(1, branch, [&ahead, &format!("unit `2`, part 0, {step}")]);
}

/// The second rank's model is changed after some steps; the message names what each wants.
fn told(steps: usize, change: impl Fn(&mut Vec<Linear<B>>) + Sync, sides: [&str; 2]) {
    let ended = ThreadGroup::spawn(2, Default::default(), |group| {
        let rank = group.rank();
        let adam = AdamWConfig::new().init();
        let settings = ZeroSettings::stage(Stage::Parameters);
        let mut update = over_ranks(adam, Arc::new(group), settings)?;
        let mut model = update.prepare(layers::<B>(3, 8, 0.2))?;
        let loss = |model: &Vec<_>| layers::loss(model, Tensor::ones([2, 8], &Default::default()));
        for _ in 0..steps {
            let gradients = GradientsParams::from_grads(loss(&model).backward(), &model);
            model = update.step(0.05, model, gradients)?;
        }
        if rank == 1 {
            change(&mut model);
        }
        Ok::<_, UpdateError>(loss(&model).into_data())
    });
    let message = match ended {
        Err(RanksError::Group(GroupFault::PeerPanicked { message, .. })) => message,
        other => panic!("{other:?}"),
    };
    assert!(sides.iter().all(|side| message.contains(side)), "{message}");
}

#[test]
fn a_panic_between_gathers_ends_all_ranks_and_leaves_nothing_behind() {
    let _turn = turn();
    let settings = ZeroSettings::stage(Stage::Parameters);
    let adam = || AdamWConfig::new().init();
    let expected = train(2, &settings, adam, Scopes::None);
    // The other rank gathers in its forward pass, or in its backward pass, under the lock of Burn's
    // graph.
    for in_backward in [false, true] {
        let ended = ThreadGroup::spawn(2, Default::default(), |group| {
            let may_go_on = group.rank() == 0;
            let mut update = over_ranks(adam(), Arc::new(group), settings.clone())?;
            let mut model = update.prepare(layers::<B>(3, 8, 0.2))?;
            let x = Tensor::ones([2, 8], &Default::default());
            let x = model[0].forward(x);
            assert!(in_backward || may_go_on, "no more of this");
            let loss = layers::loss(&model, x);
            assert!(may_go_on, "no more of this");
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = update.step(0.05, model, gradients)?;
            Ok::<_, UpdateError>(bits(&model))
        });
        let message = ended.expect_err("a rank panicked").to_string();
        assert!(
            message.contains("rank 1 panicked: no more of this"),
            "{in_backward}: {message}"
        );
        assert!(train(2, &settings, adam, Scopes::None) == expected);
    }
}

#[test]
fn a_record_is_saved_and_loaded_without_a_whole_parameter() {
    let _turn = turn();
    let dir = tempfile::tempdir().expect("a directory");
    let on_ranks = |ranks, steps| {
        let trained = ThreadGroup::spawn(ranks, Default::default(), |group| {
            let group = Arc::new(group);
            let adam = AdamWConfig::new().init();
            let settings = ZeroSettings::stage(Stage::Parameters);
            let update = reduced(adam, group.clone(), settings);
            let (mut update, reduction) = update.expect("one setting");
            let model = update.prepare(layers::<B>(3, WIDTH, 0.2));
            let recorder = reduction.recorder()?;
            let training = Training {
                model: model.expect("one model"),
                optimizer: update,
                scheduler: 0.05,
            };
            // Bytes are those of all ranks, none of which trains.
            let (bytes, training) = growth_bytes(|| {
                let loaded = recorder.load(dir.path(), None, training);
                group.barrier("loaded")?;
                Ok::<_, ZeroError>(loaded?.0)
            });
            let mut training = training?;
            for step in 0..steps {
                let x = Tensor::full([2, WIDTH], 0.1 * step as f64, &Default::default());
                let loss = layers::loss(&training.model, x);
                let gradients = training.optimizer.backward(&training.model, loss);
                let updated = training.optimizer.step(0.05, training.model, gradients);
                training.model = updated.expect("a step");
            }
            group.barrier("trained")?;
            let (saving, saved) = growth_bytes(|| {
                let state = TrainingState::at_step(steps);
                let saved = recorder.save(dir.path(), training.by_ref(), state, Keep::All);
                group.barrier("saved")?;
                saved
            });
            saved?;
            group.barrier("read")?;
            Ok::<_, ZeroError>((bits(&training.model), bytes, saving))
        });
        let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
        trained.expect("ranks agree")
    };
    let saved = on_ranks(2, 2);
    for (parameters, loading, saving) in on_ranks(3, 0) {
        assert!(parameters == saved[0].0);
        // The moments of a third, one of which is copied at a time.
        let state = 3 * WIDTH * WIDTH * 4;
        println!("loading {loading}, saving {saving} of {state}");
        assert!(saving < WIDTH * WIDTH * 4, "{saving}");
    }
}

const LARGE: usize = 32;
const LARGE_WIDTH: usize = 256;

/// Weights are drawn when they are first used.
fn lazy<B: Backend>(count: usize, width: usize) -> Vec<Linear<B>> {
    let layer = || LinearConfig::new(width, width).with_bias(false);
    (0..count)
        .map(|_| layer().init(&Default::default()))
        .collect()
}

/// Prepares what `make` gives on four ranks, none of which ever has the whole model. Returns the
/// parameters.
fn prepared_in_parts(make: impl Fn() -> Vec<Linear<B>> + Sync) -> Vec<u32> {
    const RANKS: usize = 4;
    let whole = LARGE * LARGE_WIDTH * LARGE_WIDTH * 4;
    let prepared = ThreadGroup::spawn(RANKS, Default::default(), |group| {
        let group = Arc::new(group);
        let adam = AdamWConfig::new().init();
        let settings = ZeroSettings::stage(Stage::Parameters);
        let mut update = over_ranks(adam, group.clone(), settings)?;
        group.barrier("before")?;
        let before = HEAP.current_usage();
        HEAP.reset_peak_usage();
        group.barrier("begin")?;
        let model = update.prepare(make())?;
        group.barrier("prepared")?;
        let grown = HEAP.peak_usage() - before;
        group.barrier("read")?;
        Ok::<_, UpdateError>((grown, bits(&model)))
    });
    let prepared: Result<Vec<_>, _> = prepared.expect("ranks end").into_iter().collect();
    let mut prepared = prepared.expect("ranks agree");
    let grown = prepared.iter().map(|(grown, _)| *grown).max();
    let grown = grown.expect("four ranks");
    println!("{grown} on {RANKS} ranks, of {whole} each");
    // The parts of all ranks before and after they are cut into units, and a few copies of one
    // parameter on each.
    assert!(grown < 3 * whole, "{grown} of {whole}");
    prepared.swap_remove(0).1
}

#[test]
fn no_rank_has_the_whole_model_when_it_is_prepared() {
    let _turn = turn();
    prepared_in_parts(|| lazy(LARGE, LARGE_WIDTH));
}

mod learner {
    //! The stack of layers in a Learner.

    use burn::data::dataloader::{DataLoaderBuilder, batcher::Batcher};
    use burn::data::dataset::InMemDataset;
    use burn::lr_scheduler::constant::ConstantLr;
    use burn::tensor::backend::AutodiffBackend;
    use burn::train::{
        InferenceStep, Learner, LearningComponentsMarker, SupervisedTraining, TrainOutput,
        TrainStep,
    };
    use burn_update::UpdateStrategy;
    use burn_zero::SilentRenderer;

    use super::*;

    /// The peak of the heap when the first rank began its first step.
    pub static PREPARED: AtomicUsize = AtomicUsize::new(0);

    type Components = LearningComponentsMarker<B, ConstantLr, Large<B>, Update<Large<B>, B>>;

    #[derive(Module, Debug)]
    pub struct Large<B: Backend> {
        layers: Vec<Linear<B>>,
    }

    fn input<B: Backend>() -> Tensor<B, 2> {
        Tensor::full([2, LARGE_WIDTH], 0.5, &Default::default())
    }

    impl<B: AutodiffBackend> TrainStep for Large<B> {
        type Input = ();
        type Output = ();

        fn step(&self, (): ()) -> TrainOutput<()> {
            let peak = HEAP.peak_usage();
            let _ = PREPARED.compare_exchange(0, peak, Relaxed, Relaxed);
            let gradients = layers::loss(&self.layers, input()).backward();
            TrainOutput::new(self, gradients, ())
        }
    }

    impl<B: Backend> InferenceStep for Large<B> {
        type Input = ();
        type Output = ();

        fn step(&self, (): ()) {
            layers::loss(&self.layers, input());
        }
    }

    struct Nothing;

    impl<B: Backend> Batcher<B, u8, ()> for Nothing {
        fn batch(&self, _: Vec<u8>, _: &B::Device) {}
    }

    /// Trains each of `ranks` for two steps, and validates.
    pub fn train(
        ranks: usize,
        over: impl FnOnce(UpdateStrategy<Components>) -> UpdateStrategy<Components>,
        layers: Vec<Linear<B>>,
        settings: ZeroSettings,
    ) {
        let directory = tempfile::tempdir().expect("a directory");
        let items = InMemDataset::new(vec![0; 2 * ranks]);
        let train = DataLoaderBuilder::new(Nothing).batch_size(1).build(items);
        let items = InMemDataset::new(vec![0; ranks]);
        let valid = DataLoaderBuilder::new(Nothing).batch_size(1).build(items);
        let on_host = OffloadConfig::new(HostAdamWConfig::default()).init();
        let update = Update::new(on_host.expect("valid")).reduce_in_learner(settings);
        let update: Update<Large<B>, B> = update.expect("one reduction");
        let strategy = over(update.strategy());
        let learner = Learner::new(Large { layers }, update, ConstantLr::new(1e-3));
        SupervisedTraining::new(directory.path(), train, valid)
            .num_epochs(1)
            .renderer(SilentRenderer)
            .with_application_logger(None)
            .with_training_strategy(strategy.into())
            .launch(learner);
    }
}

#[test]
fn nor_does_the_device_of_a_learner() {
    let _turn = turn();
    let layer = LARGE_WIDTH * LARGE_WIDTH * 4;
    // Each rank at its worst moment: the unit that computes, the next one, a gradient and its
    // bucket. Which ranks are there at once varies.
    for (ranks, most) in [(1, 5), (4, 4 * 4)] {
        let model = offload_parameters::<B, _>(lazy(LARGE, LARGE_WIDTH));
        let model = model.expect("a backend with `Remat`");
        let train = || learner::train(ranks, |strategy| strategy.threads(ranks), model, on_host());
        let (held, ()) = growth_bytes(train);
        println!("{held} on the device of {ranks} ranks, {layer} a layer");
        assert!(held <= most * layer, "{held}");
    }
}

#[test]
fn nor_does_a_process_that_runs_a_learner() {
    let _turn = turn();
    const RANKS: usize = 4;
    let whole = LARGE * LARGE_WIDTH * LARGE_WIDTH * 4;
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    learner::PREPARED.store(0, Relaxed);
    let trained = ThreadGroup::spawn(RANKS, Default::default(), |group| {
        let group: Arc<dyn ProcessGroup> = Arc::new(group);
        let model = shard_parameters::<B, _>(lazy(LARGE, LARGE_WIDTH), &group)?;
        learner::train(RANKS, |strategy| strategy.process(group), model, on_host());
        Ok::<_, UpdateError>(())
    });
    let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
    trained.expect("ranks agree");
    let grown = learner::PREPARED.load(Relaxed) - before;
    println!("{grown} on {RANKS} ranks before the first step, of {whole} each");
    // The parts of all ranks three times: the Learner's model, which it keeps during a step, as it
    // is prepared, and cut into units.
    assert!(grown < 4 * whole, "{grown} of {whole}");
}

/// ZeRO's formula (arXiv 1910.02054, section 3.1, with N_d ranks): 16 bytes of 1/N of the elements,
/// and what is in use.
#[test]
fn a_rank_holds_its_share_two_units_and_the_gradients_of_one() {
    let _turn = turn();
    const RANKS: usize = 4;
    let layer = LARGE_WIDTH * LARGE_WIDTH * 4;
    let settings = ZeroSettings {
        bucket_elements: LARGE_WIDTH * LARGE_WIDTH,
        ..ZeroSettings::stage(Stage::Parameters)
    };
    let held = ThreadGroup::spawn(RANKS, Default::default(), |group| {
        let group = Arc::new(group);
        let adam = AdamWConfig::new().init();
        let mut update = over_ranks(adam, group.clone(), settings.clone())?;
        let mut model = update.prepare(lazy::<B>(LARGE, LARGE_WIDTH))?;
        let mut train = || {
            for _ in 0..3 {
                let x = Tensor::full([2, LARGE_WIDTH], 0.5, &Default::default());
                let gradients = layers::loss(&model, x).backward();
                let gradients = GradientsParams::from_grads(gradients, &model);
                model = update.step(0.01, core::mem::take(&mut model), gradients)?;
                group.barrier("step")?;
            }
            Ok::<_, UpdateError>(())
        };
        // Bytes are those of all ranks.
        match group.rank() {
            0 => {
                let (held, trained) = growth_bytes(train);
                trained.map(|()| Some(held))
            }
            _ => train().map(|()| None),
        }
    });
    let held = held.expect("ranks end").swap_remove(0);
    let held = held.expect("ranks agree").expect("of rank 0") / RANKS;
    let share = 4 * LARGE * layer / RANKS;
    let activations = LARGE * 2 * 2 * LARGE_WIDTH * 4;
    let most = share + 3 * layer + activations;
    println!("{held} a rank, {most} by the formula");
    assert!(held * 100 <= most * 102, "{held} of {most}");
    // Moments are half of the share.
    assert!(held * 2 > share, "{held} of {share}");
}

fn on_host() -> ZeroSettings {
    ZeroSettings {
        gradients: Memory::Host,
        parameters: Memory::Host,
        bucket_elements: LARGE_WIDTH * LARGE_WIDTH,
        ..ZeroSettings::stage(Stage::Parameters)
    }
}

/// All layers frozen but the last.
fn frozen<B: Backend>(layers: Vec<Linear<B>>) -> Vec<Linear<B>> {
    let last = layers.len() - 1;
    frozen_but(layers, last)
}

/// All layers frozen but one. `no_grad` would draw their weights.
fn frozen_but<B: Backend>(layers: Vec<Linear<B>>, trained: usize) -> Vec<Linear<B>> {
    let layers = layers.into_iter().enumerate().map(|(index, mut layer)| {
        layer.weight = layer.weight.set_require_grad(index == trained);
        layer
    });
    layers.collect()
}

#[test]
fn nor_when_most_of_it_is_frozen() {
    let _turn = turn();
    prepared_in_parts(|| frozen(lazy(LARGE, LARGE_WIDTH)));
}

#[test]
fn frozen_parameters_are_sharded_with_the_bits_of_stage_2_and_saved_in_parts() {
    let _turn = turn();
    let dir = tempfile::tempdir().expect("a directory");
    // After the loading of what there is, and so many steps.
    let train = |stage, ranks, steps, spread, save: bool| {
        let trained = ThreadGroup::spawn(ranks, Default::default(), |group| {
            let group = Arc::new(group);
            let adam = AdamWConfig::new().init();
            // A record is the same, wherever shards are that are saved.
            let settings = ZeroSettings {
                shards: if save { Memory::Device } else { Memory::Host },
                ..ZeroSettings::stage(stage)
            };
            let update = reduced(adam, group.clone(), settings);
            let (mut update, reduction) = update.expect("one setting");
            let model = update.prepare(frozen(layers::<B>(4, WIDTH, spread)));
            let recorder = reduction.recorder()?;
            let training = Training {
                model: model.expect("one model"),
                optimizer: update,
                scheduler: 0.05,
            };
            let (mut training, _) = recorder.load(dir.path(), None, training)?;
            let whole = WIDTH * WIDTH * 4;
            let mut held = 0;
            for step in 0..steps {
                let x = Tensor::full([2, WIDTH], 0.1 * step as f64, &Default::default());
                let (bytes, loss) = growth_bytes(|| layers::loss(&training.model, x));
                held = held.max(bytes);
                let gradients = training.optimizer.backward(&training.model, loss);
                let updated = training.optimizer.step(0.05, training.model, gradients);
                training.model = updated.expect("a step");
            }
            assert!(
                stage != Stage::Parameters || held < 2 * ranks * whole,
                "{held}"
            );
            if save {
                let state = TrainingState::at_step(steps);
                recorder.save(dir.path(), training.by_ref(), state, Keep::All)?;
            }
            // Again, with leaves that stay.
            let prepared = training.optimizer.prepare(training.model);
            training.model = prepared.expect("the same model");
            Ok::<_, ZeroError>(bits(&training.model))
        });
        let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
        let mut trained = trained.expect("ranks agree");
        assert!(trained.iter().all(|rank| *rank == trained[0]));
        trained.swap_remove(0)
    };
    let expected = train(Stage::Gradients, 2, 2, 0.2, false);
    let saved = train(Stage::Parameters, 2, 2, 0.2, true);
    assert!(saved == expected);
    // Into a model with other weights.
    for (stage, ranks) in [
        (Stage::Parameters, 3),
        (Stage::Gradients, 2),
        (Stage::Parameters, 1),
    ] {
        assert!(
            train(stage, ranks, 0, 0.1, false) == saved,
            "{stage}, {ranks} ranks"
        );
    }
}

#[test]
fn a_frozen_one_is_gathered_in_forward_and_in_backward_as_estimated() {
    let _turn = turn();
    const RANKS: usize = 2;
    let between = || {
        let mut layers = layers::<B>(3, WIDTH, 0.2);
        layers[1] = layers[1].clone().no_grad();
        layers
    };
    let gathered = ThreadGroup::spawn(RANKS, Default::default(), |group| {
        let group = Arc::new(group);
        let (adam, settings) = (
            AdamWConfig::new().init(),
            ZeroSettings::stage(Stage::Parameters),
        );
        let mut update = over_ranks(adam, group.clone(), settings)?;
        let model = update.prepare(between())?;
        let before = group.traffic().of(Operation::AllGather).elements;
        let loss = layers::loss(&model, Tensor::ones([2, WIDTH], &Default::default()));
        drop(loss.backward());
        Ok::<_, UpdateError>(group.traffic().of(Operation::AllGather).elements - before)
    });
    let model = ModelStates::of::<B, _>(&between());
    let config = ZeroConfig {
        stage: Stage::Parameters,
        ..ZeroConfig::default()
    };
    let said = |model| estimate(&model, &config, RANKS).sent_elements;
    let of_frozen = said(model) - said(ModelStates::adam(model.elements));
    // The trained ones once: backward does not use the first, and the last stays from forward.
    let trained = model.elements / RANKS as u64;
    for gathered in gathered.expect("ranks end") {
        assert_eq!(gathered.expect("ranks agree"), trained + of_frozen);
    }
}

#[test]
fn a_frozen_parameter_is_trained_after_it_is_prepared_again() {
    let _turn = turn();
    // A layer behind it is trained before, and one in front of it, whose shard then is another part
    // of it.
    trained_again(2, [true, false, false]);
    trained_again(0, [false, false, true]);
}

/// Trains layer `first`, and after the model is prepared again layer 1 too: which of three layers
/// have not changed after that.
fn trained_again(first: usize, unchanged: [bool; 3]) {
    let trained = ThreadGroup::spawn(2, Default::default(), |group| {
        let (adam, settings) = (
            AdamWConfig::new().init(),
            ZeroSettings::stage(Stage::Parameters),
        );
        let mut update = over_ranks(adam, Arc::new(group), settings)?;
        let mut model = update.prepare(frozen_but(layers::<B>(3, WIDTH, 0.2), first))?;
        model[1].weight = model[1].weight.clone().set_require_grad(true);
        let mut model = update.prepare(model)?;
        let before = bits(&model);
        let loss = layers::loss(&model, Tensor::ones([2, WIDTH], &Default::default()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = update.step(0.05, model, gradients)?;
        let after = bits(&model);
        let layer = |of: usize| of * WIDTH * WIDTH..(of + 1) * WIDTH * WIDTH;
        Ok::<_, UpdateError>([0, 1, 2].map(|of| before[layer(of)] == after[layer(of)]))
    });
    for same in trained.expect("ranks end") {
        assert_eq!(same.expect("ranks agree"), unchanged);
    }
}

/// Under autocast AdamW computes new values in f32; a shard is in its parameter's type all the same.
#[test]
fn shards_on_the_device_stay_in_the_type_of_low_parameters() {
    type Low = Autocast<B, Bf16>;
    let _turn = turn();
    let trained = |shards| {
        let trained = ThreadGroup::spawn(2, Default::default(), |group| {
            let settings = ZeroSettings {
                shards,
                ..ZeroSettings::stage(Stage::Parameters)
            };
            let adam = AdamWConfig::new().init();
            let mut update = over_ranks(adam, Arc::new(group), settings)?;
            let mut model = layers::<Low>(2, WIDTH, 0.2);
            for layer in &mut model {
                let low = layer.weight.val().cast(DType::BF16).detach();
                layer.weight = Param::from_tensor(low);
            }
            model = update.prepare(model)?;
            for _ in 0..2 {
                let loss = layers::loss(&model, Tensor::ones([2, WIDTH], &Default::default()));
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = update.step(0.05, model, gradients)?;
            }
            let weights = model.iter().map(|layer| layer.weight.val().into_data());
            Ok::<_, UpdateError>(weights.collect::<Vec<_>>())
        });
        let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
        trained.expect("ranks agree")
    };
    let on_device = trained(Memory::Device);
    let weights = on_device.iter().flatten();
    assert!(weights.clone().all(|weight| weight.dtype == DType::BF16));
    // The backend's cast rounds: that of burn-flex 0.21 rounds what is just above the middle of two
    // numbers to the even one of them.
    let values = |weights: Vec<Vec<TensorData>>| {
        let weights = weights.into_iter().flatten();
        let values = weights.map(|weight| weight.iter::<f32>().collect::<Vec<_>>());
        values.collect::<Vec<_>>().concat()
    };
    let pairs = values(on_device)
        .into_iter()
        .zip(values(trained(Memory::Host)));
    for (device, host) in pairs {
        let rounding = host.abs() / 128.0;
        assert!((device - host).abs() <= rounding, "{device}, not {host}");
    }
}

/// A rank may hold nothing of a layer before and after: it takes part in the gather all the same.
#[test]
fn a_layer_is_frozen_before_the_first_update_on_three_ranks() {
    let _turn = turn();
    let trained = ThreadGroup::spawn(3, Default::default(), |group| {
        let settings = ZeroSettings::stage(Stage::Parameters);
        let mut update = over_ranks(SgdConfig::new().init(), Arc::new(group), settings)?;
        let mut model = update.prepare(layers::<B>(3, WIDTH, 0.2))?;
        let before = bits(&model);
        model[2].weight = model[2].weight.clone().set_require_grad(false);
        let model = update.prepare(model)?;
        Ok::<_, UpdateError>(bits(&model) == before)
    });
    for same in trained.expect("ranks end") {
        assert!(same.expect("ranks agree"));
    }
}

/// f64 is sent by no collective: the parameter is gathered in its own type and cast.
#[test]
fn a_parameter_that_is_cast_to_f64_keeps_its_values() {
    let _turn = turn();
    let sums = ThreadGroup::spawn(2, Default::default(), |group| {
        let settings = ZeroSettings::stage(Stage::Parameters);
        let mut update = over_ranks(SgdConfig::new().init(), Arc::new(group), settings)?;
        let mut model = update.prepare(layers::<B>(3, WIDTH, 0.2))?;
        let mut sums = Vec::new();
        for _ in 0..3 {
            let loss = |layer: &Linear<B>| layer.weight.val().cast(DType::F64).abs().sum();
            let loss = model
                .iter()
                .map(loss)
                .reduce(|sum, more| sum + more)
                .expect("layers");
            sums.push(loss.clone().into_scalar().elem::<f64>());
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = update.step(0.0, model, gradients)?;
        }
        Ok::<_, UpdateError>(sums)
    });
    for sums in sums.expect("ranks end") {
        let sums = sums.expect("ranks agree");
        assert!(
            sums[0] > 0.0 && sums.iter().all(|sum| *sum == sums[0]),
            "{sums:?}"
        );
    }
}

#[test]
fn nor_when_it_is_read_from_a_safetensors_file() {
    let _turn = turn();
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("model.safetensors");
    let saved = layers::<Flex>(LARGE, LARGE_WIDTH, 0.2);
    let expected = bits(&saved);
    let mut store = SafetensorsStore::from_file(&file);
    saved.save_into(&mut store).expect("it is written");
    drop((saved, store));
    let read = |model| read_on_use::<B, _>(model, &file);
    let found = prepared_in_parts(|| read(lazy(LARGE, LARGE_WIDTH)).expect("the same model"));
    assert!(found == expected);

    let others = [
        (LARGE - 1, LARGE_WIDTH),
        (LARGE + 1, LARGE_WIDTH),
        (LARGE, 8),
    ];
    for (count, width) in others {
        let error = read(lazy(count, width)).err();
        let is_other = matches!(
            error,
            Some(ZeroError::Record(RecordFault::OtherModel { .. }))
        );
        assert!(is_other, "{count}, {width}: {error:?}");
    }
    let mut cut = std::fs::read(&file).expect("it is there");
    cut.pop();
    for torn in [cut, b"no tensors".to_vec()] {
        std::fs::write(&file, torn).expect("it is written");
        let error = read(lazy(LARGE, LARGE_WIDTH)).err();
        assert!(
            matches!(error, Some(ZeroError::Record(RecordFault::Torn { .. }))),
            "{error:?}"
        );
    }
}

#[test]
fn integers_and_booleans_are_read_too() {
    #[derive(Module, Debug)]
    struct Net<B: Backend> {
        linear: Linear<B>,
        positions: Param<Tensor<B, 1, Int>>,
        mask: Param<Tensor<B, 2, Bool>>,
    }
    fn net<B: Backend>(first: i32, mask: [bool; 2]) -> Net<B> {
        let device = Default::default();
        let positions = Tensor::from_data([first, 1 << 20, -3], &device);
        let mask = Tensor::from_data([mask], &device);
        Net {
            linear: LinearConfig::new(3, 2).init(&device),
            positions: Param::initialized(ParamId::new(), positions),
            mask: Param::initialized(ParamId::new(), mask),
        }
    }
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("model.safetensors");
    let saved = net::<Flex>(7, [true, false]);
    let mut store = SafetensorsStore::from_file(&file);
    saved.save_into(&mut store).expect("it is written");
    let read = read_on_use::<B, _>(net(0, [false, false]), &file).expect("the same model");
    assert!(bits(&read) == bits(&saved));
    let (positions, mask) = (
        read.positions.val().into_data(),
        read.mask.val().into_data(),
    );
    positions.assert_eq(&saved.positions.val().into_data(), false);
    mask.assert_eq(&saved.mask.val().into_data(), false);

    // A large file of another format, whose first bytes are no length.
    let other = dir.path().join("other");
    fs::write(&other, [0x80; 16]).expect("it is written");
    let large = fs::OpenOptions::new().write(true).open(&other);
    let large = large.and_then(|file| file.set_len(1 << 26));
    large.expect("it is lengthened");
    HEAP.reset_peak_usage();
    let before = HEAP.current_usage();
    let error = read_on_use::<B, _>(net(0, [false, false]), &other).err();
    assert!(
        matches!(error, Some(ZeroError::Record(RecordFault::Torn { .. }))),
        "{error:?}"
    );
    let read = HEAP.peak_usage() - before;
    assert!(read < 1 << 20, "{read} bytes were read");

    let without = LinearConfig::new(3, 2).init::<B>(&Default::default());
    let error = read_on_use::<B, _>(without, &file).err();
    assert!(
        matches!(
            error,
            Some(ZeroError::Record(RecordFault::OtherModel { .. }))
        ),
        "{error:?}"
    );
}

#[test]
fn a_layer_with_columns_first_is_read_as_burn_loads_it() {
    let (dir, device) = (
        tempfile::tempdir().expect("a directory"),
        Default::default(),
    );
    for outputs in [6, 10] {
        let layer = LinearConfig::new(6, outputs).with_layout(LinearLayout::Col);
        let file = dir.path().join(format!("{outputs}.safetensors"));
        let saved = layer.init::<Flex>(&device);
        let mut store = SafetensorsStore::from_file(&file);
        saved.save_into(&mut store).expect("it is written");
        let expected = saved.weight.val().into_data();
        let (lazy, used) = (layer.init::<B>(&device), layer.init::<B>(&device));
        drop(used.weight.val());
        for model in [lazy, used] {
            let read = read_on_use::<B, _>(model, &file).expect("the same model");
            let frozen = read.weight.clone().set_require_grad(false);
            assert!(!frozen.is_require_grad());
            for weight in [read.weight, frozen] {
                weight.val().into_data().assert_eq(&expected, true);
            }
        }
    }
}

#[test]
fn floats_of_a_file_are_rounded_once_to_the_type_of_the_parameter() {
    let (dir, device) = (
        tempfile::tempdir().expect("a directory"),
        Default::default(),
    );
    // In bf16 the first is 1 if it is rounded to f32 before.
    let data = TensorData::from([1.0 + 0.00390625 + 1e-12, 0.1, -3.5e4]);
    let of = |dtype| data.clone().convert_dtype(dtype);
    let types = [DType::F64, DType::F32, DType::F16, DType::BF16];
    for in_file in types {
        let file = dir.path().join(format!("{in_file:?}"));
        let values = Tensor::<Flex, 1>::from_data(of(in_file), (&device, in_file));
        let saved = vec![Param::from_tensor(values)];
        let mut store = SafetensorsStore::from_file(&file);
        saved.save_into(&mut store).expect("it is written");
        for dtype in types {
            let zeros = Tensor::<B, 1>::zeros([3], (&device, dtype));
            let model = vec![Param::from_tensor(zeros)];
            let read = read_on_use::<B, _>(model, &file).expect("the same model");
            let expected = of(in_file).convert_dtype(dtype);
            read[0].val().into_data().assert_eq(&expected, true);
        }
    }
}

#[test]
fn weights_that_a_program_sets_are_sharded_when_they_are_prepared() {
    let _turn = turn();
    let run = |stage| {
        let trained = ThreadGroup::spawn(2, Default::default(), move |group| {
            let adam = AdamWConfig::new().init();
            let mut update = over_ranks(adam, Arc::new(group), ZeroSettings::stage(stage))?;
            let mut model = update.prepare(layers::<B>(3, 8, 0.2))?;
            for _ in 0..2 {
                let weight = model[1].weight.clone();
                model[1].weight = weight.map(|weight| {
                    let half = (weight * 0.5).into_data();
                    Tensor::from_data(half, &Default::default()).require_grad()
                });
                model = update.prepare(model)?;
                let x = Tensor::ones([2, 8], &Default::default());
                let loss = layers::loss(&model, x);
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = update.step(0.05, model, gradients)?;
            }
            Ok::<_, UpdateError>(bits(&model))
        });
        let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
        trained.expect("ranks agree")
    };
    assert!(run(Stage::Gradients) == run(Stage::Parameters));
}

#[test]
fn so_are_frozen_ones_that_are_loaded() {
    let _turn = turn();
    let dir = tempfile::tempdir().expect("a directory");
    let expected = bits(&layers::<B>(3, WIDTH, 0.1));
    let loaded = ThreadGroup::spawn(2, Default::default(), |group| {
        let of_rank = [0.1, 0.3][group.rank()];
        let (adam, settings) = (
            AdamWConfig::new().init(),
            ZeroSettings::stage(Stage::Parameters),
        );
        let update = reduced(adam, Arc::new(group), settings);
        let (mut update, reduction) = update.expect("one setting");
        let model = offload_parameters::<B, _>(frozen(layers(3, WIDTH, 0.2)))?;
        let model = update.prepare(model).expect("one model");
        let model = model.load_record(layers::<B>(3, WIDTH, of_rank).into_record());
        let training = Training {
            model: update.prepare(model).expect("one model"),
            scheduler: 0.05,
            optimizer: update,
        };
        let recorder = reduction.recorder()?;
        let state = TrainingState::at_step(0);
        recorder.save(dir.path(), training.by_ref(), state, Keep::All)?;
        let (saved, _) = recorder.load(dir.path(), None, training.clone())?;
        Ok::<_, ZeroError>((bits(&training.model), bits(&saved.model)))
    });
    for rank in loaded.expect("ranks end") {
        let (loaded, saved) = rank.expect("ranks agree");
        assert!(loaded == expected && saved == expected);
    }
}

/// What the update moves between device and host in a step that uses all layers, and in one that
/// leaves one of three out.
#[test]
fn shards_of_parameters_without_a_gradient_are_not_made_again() {
    let _turn = turn();
    type Low = Autocast<B, Bf16>;
    let run = |shards| {
        let moved_bytes = ThreadGroup::spawn(2, Default::default(), |group| {
            let group = Arc::new(group);
            let settings = ZeroSettings {
                shards,
                ..ZeroSettings::stage(Stage::Parameters)
            };
            let sgd = SgdConfig::new().init();
            let mut update = over_ranks(sgd, group.clone(), settings)?;
            let mut model = update.prepare(layers::<Low>(3, WIDTH, 0.2))?;
            let mut moved_bytes = Vec::new();
            for step in 0..4 {
                let x = Tensor::ones([2, WIDTH], &Default::default());
                let used: Vec<_> = match step {
                    3 => vec![model[0].clone(), model[2].clone()],
                    _ => model.clone(),
                };
                let gradients = layers::loss(&used, x).backward();
                let gradients = GradientsParams::from_grads(gradients, &model);
                drop(used);
                group.barrier("backward")?;
                take_events();
                group.barrier("an update")?;
                model = update.step(0.01, model, gradients)?;
                group.barrier("updated")?;
                moved_bytes.push(moved(&take_events()));
                group.barrier("taken")?;
            }
            Ok::<_, UpdateError>(moved_bytes)
        });
        let ranks: Result<Vec<_>, _> = moved_bytes.expect("ranks end").into_iter().collect();
        // Of the ranks that take the events one finds them.
        let [all, without_one] = [2, 3].map(|step| {
            let ranks = ranks.as_ref().expect("ranks agree").iter();
            let found = ranks.map(|steps| steps[step]).max();
            found.expect("two ranks")
        });
        (all, without_one)
    };
    for shards in [Memory::Host, Memory::Device] {
        let (all, without_one) = run(shards);
        let expected = (all.0 * 2 / 3, all.1 * 2 / 3);
        assert_eq!(without_one, expected, "{shards:?}: {all:?}");
    }
}

/// Between steps a program sets the weight of a frozen layer: to other numbers, or to another type.
#[test]
fn a_frozen_parameter_that_is_replaced_leaves_no_shard_behind() {
    let _turn = turn();
    const RANKS: usize = 2;
    const LAYER_BYTES: usize = WIDTH * WIDTH * 4;
    let run = |stage, dtype: DType| {
        let trained = ThreadGroup::spawn(RANKS, Default::default(), |group| {
            let group = Arc::new(group);
            let settings = ZeroSettings {
                shards: Memory::Device,
                ..ZeroSettings::stage(stage)
            };
            let sgd = SgdConfig::new().init();
            let mut update = over_ranks(sgd, group.clone(), settings)?;
            let mut model = update.prepare(frozen_but(layers::<B>(3, WIDTH, 0.2), 2))?;
            let mut live = Vec::new();
            for step in 0..3 {
                if step == 1 {
                    let other = layers::<B>(3, WIDTH, 0.1).swap_remove(0).weight.val();
                    let other = other.into_data().convert_dtype(dtype);
                    let other = Tensor::from_data(other, (&Default::default(), dtype));
                    model[1].weight = Param::initialized(model[1].weight.id, other);
                }
                let x = Tensor::ones([2, WIDTH], &Default::default());
                let loss = model.iter().fold(x, |x, layer| {
                    let weight = layer.weight.val().cast(DType::F32);
                    x.matmul(weight).tanh()
                });
                let gradients = GradientsParams::from_grads(loss.sum().backward(), &model);
                model = update.step(0.05, model, gradients)?;
                group.barrier("a step")?;
                live.push(live_bytes());
                group.barrier("read")?;
            }
            let values = model.iter().map(|layer| layer.weight.val().into_data());
            let values = values.flat_map(|data| data.iter::<f32>().collect::<Vec<_>>());
            Ok::<_, UpdateError>((live, values.collect::<Vec<_>>()))
        });
        let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
        trained.expect("ranks agree").swap_remove(0)
    };
    for dtype in [DType::F32, DType::BF16] {
        let (_, expected) = run(Stage::Gradients, dtype);
        let (live, found) = run(Stage::Parameters, dtype);
        assert!(found == expected, "{dtype:?}");
        let whole = RANKS * LAYER_BYTES / 2;
        let grown = match dtype {
            DType::BF16 => whole as i64 - LAYER_BYTES as i64,
            _ => 0,
        };
        assert_eq!(
            live[2] as i64 - live[0] as i64,
            grown,
            "{dtype:?}: {live:?}"
        );
    }
}

/// DPO's reference model: a clone of the trained one, used in each step before it or after it.
#[test]
fn a_reference_model_has_an_order_of_gathers_of_its_own() {
    let _turn = turn();
    const LAYERS: usize = 4;
    const STEPS: usize = 5;
    for is_first in [false, true] {
        let gathered = ThreadGroup::spawn(2, Default::default(), |group| {
            let group = Arc::new(group);
            let settings = ZeroSettings::stage(Stage::Parameters);
            let mut update = over_ranks(SgdConfig::new().init(), group.clone(), settings)?;
            let mut model = update.prepare(layers::<B>(LAYERS, WIDTH, 0.2))?;
            let reference = model.valid();
            let sent = || group.traffic().of(Operation::AllGather).elements;
            let mut gathered = Vec::new();
            for _ in 0..STEPS {
                let before = sent();
                let x = Tensor::<B, 2>::ones([2, WIDTH], &Default::default());
                let of_reference = || layers::loss(&reference, x.clone().inner());
                let of_model = || layers::loss(&model, x.clone());
                let (reference, loss) = if is_first {
                    let reference = of_reference();
                    (reference, of_model())
                } else {
                    let loss = of_model();
                    (of_reference(), loss)
                };
                let loss = loss - Tensor::from_inner(reference);
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = update.step(0.01, model, gradients)?;
                group.barrier("a step")?;
                gathered.push((sent() - before) / (WIDTH * WIDTH / 2) as u64);
            }
            Ok::<_, UpdateError>(gathered)
        });
        for gathered in gathered.expect("ranks end") {
            let gathered = gathered.expect("ranks agree");
            // In forward each layer of both, in backward each of the trained one but the last, which
            // stays. From the step on that has shown the two orders nothing is gathered in vain.
            let used = (2 * LAYERS + LAYERS - 2) as u64;
            assert_eq!(gathered[2..], [used; STEPS - 2], "{is_first}: {gathered:?}");
        }
    }
}

/// A reference model that is cloned before a step has shown in which types parameters are used.
#[test]
fn a_reference_model_is_gathered_in_the_low_type_too() {
    let _turn = turn();
    type Low = Autocast<B, Bf16>;
    const LAYERS: usize = 4;
    const STEPS: usize = 4;
    for shards in [Memory::Host, Memory::Device] {
        let trained = ThreadGroup::spawn(2, Default::default(), |group| {
            let group = Arc::new(group);
            let settings = ZeroSettings {
                shards,
                ..ZeroSettings::stage(Stage::Parameters)
            };
            let mut update = over_ranks(SgdConfig::new().init(), group.clone(), settings)?;
            let mut model = update.prepare(layers::<Low>(LAYERS, WIDTH, 0.2))?;
            let reference = model.valid();
            let sent = || group.traffic().of(Operation::AllGather).data_bytes;
            let (mut gathered, mut losses) = (Vec::new(), Vec::new());
            for _ in 0..STEPS {
                let x = Tensor::<Low, 2>::ones([2, WIDTH], &Default::default());
                let gradients = layers::loss(&model, x.clone()).backward();
                let gradients = GradientsParams::from_grads(gradients, &model);
                model = update.step(0.01, model, gradients)?;
                group.barrier("a step")?;
                let before = sent();
                losses.push(layers::loss(&reference, x.inner()).into_data());
                group.barrier("the reference")?;
                gathered.push((sent() - before) / (WIDTH * WIDTH / 2) as u64);
            }
            // It has its own type all the same, and its elements.
            Ok::<_, UpdateError>((gathered, losses, bits(&reference)))
        });
        let start = bits(&layers::<Flex>(LAYERS, WIDTH, 0.2));
        for rank in trained.expect("ranks end") {
            let (gathered, losses, reference) = rank.expect("ranks agree");
            assert!(losses.iter().all(|loss| *loss == losses[0]));
            assert!(reference == start);
            // Two bytes an element.
            assert_eq!(
                gathered[1..],
                [2 * LAYERS as u64; STEPS - 1],
                "{shards:?}: {gathered:?}"
            );
        }
    }
}

/// A validation between two steps is forward only: the steps after it expect the order of a step.
#[test]
fn after_a_validation_steps_gather_no_unit_in_vain() {
    const BEFORE: usize = 3;
    let (gathered, used) = gathered_by_steps(BEFORE, 1);
    for gathered in gathered {
        assert_eq!(
            gathered[BEFORE + 1..],
            vec![used; gathered.len() - BEFORE - 1],
            "{gathered:?}"
        );
    }
}

#[test]
fn nor_after_one_before_the_first_step() {
    for batches in [1, 2] {
        let (gathered, used) = gathered_by_steps(0, batches);
        for gathered in gathered {
            assert_eq!(gathered, vec![used; gathered.len()], "{batches} batches");
        }
    }
}

/// The layers that the steps of each rank gather, if it validates with so many batches before the
/// step of this number; and the layers that a step uses.
fn gathered_by_steps(validates_before: usize, batches: usize) -> (Vec<Vec<u64>>, u64) {
    let _turn = turn();
    const LAYERS: usize = 4;
    const STEPS: usize = 6;
    let gathered = ThreadGroup::spawn(2, Default::default(), |group| {
        let group = Arc::new(group);
        let settings = ZeroSettings::stage(Stage::Parameters);
        let mut update = over_ranks(SgdConfig::new().init(), group.clone(), settings)?;
        let mut model = update.prepare(layers::<B>(LAYERS, WIDTH, 0.2))?;
        let sent = || group.traffic().of(Operation::AllGather).elements;
        let mut gathered = Vec::new();
        for step in 0..STEPS {
            let x = Tensor::<B, 2>::ones([2, WIDTH], &Default::default());
            if step == validates_before {
                for _ in 0..batches {
                    layers::loss(&model.valid(), x.clone().inner()).into_data();
                }
            }
            group.barrier("validated")?;
            let before = sent();
            let gradients = layers::loss(&model, x).backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = update.step(0.01, model, gradients)?;
            group.barrier("a step")?;
            gathered.push((sent() - before) / (WIDTH * WIDTH / 2) as u64);
        }
        Ok::<_, UpdateError>(gathered)
    });
    let gathered: Result<Vec<_>, _> = gathered.expect("ranks end").into_iter().collect();
    // In forward each layer, in backward each but the first and the last, which stays.
    (gathered.expect("ranks agree"), (2 * LAYERS - 2) as u64)
}

/// Under autocast, of a unit that all ranks gather: a rank that does not use a parameter does not
/// know that it is cast.
#[test]
fn a_parameter_that_one_rank_uses_is_gathered_in_one_type_by_all() {
    let _turn = turn();
    type Low = Autocast<B, Bf16>;
    let run = |stage, is_frozen: bool| {
        let trained = ThreadGroup::spawn(2, Default::default(), |group| {
            let rank = group.rank();
            let settings = ZeroSettings::stage(stage);
            let reduction = RankReduction::new(settings, Arc::new(group))?;
            let reduction = reduction.with_units(|_| "all".to_owned());
            let mut update = Update::new(SgdConfig::new().init()).reduce_by(&reduction)?;
            let mut model = layers::<Low>(3, WIDTH, 0.2);
            if is_frozen {
                model = frozen_but(model, 0);
            }
            model = update.prepare(model)?;
            for step in 0..4 {
                let x = Tensor::full([2, WIDTH], 0.1 * step as f64, &Default::default());
                let mut used = model.clone();
                if rank == 1 && step < 3 {
                    used.remove(1);
                }
                let loss = layers::loss(&used, x);
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = update.step(0.05, model, gradients)?;
            }
            Ok::<_, UpdateError>(bits(&model))
        });
        let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
        trained.expect("ranks agree")
    };
    for is_frozen in [false, true] {
        let expected = run(Stage::DataParallel, is_frozen);
        assert!(run(Stage::Parameters, is_frozen) == expected, "{is_frozen}");
    }
}
