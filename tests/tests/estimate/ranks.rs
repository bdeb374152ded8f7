//! One rank of many, simulated: against the formulas of ZeRO (arXiv 1910.02054) and against ranks
//! that are there.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor};
use burn_amp::Autocast;
use burn_checkpoint::Remat;
use burn_estimate::{
    DeviceProfile, Estimate, Kind, Meta, MetaDevice, Shares, estimate_on, estimate_rank,
};
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{
    GroupOptions, HostAdamWConfig, Memory, ModelStates, OffloadConfig, ParameterShards,
    ProcessGroup, ReduceOverRanks, Sharded, SimulatedRank, Stage, ThreadGroup, ZeroConfig,
    ZeroSettings,
};
use examples::gpt::loader::TokenBatch;
use examples::gpt::model::{Gpt as GptModel, GptConfig};
use examples::training::recompute::Checkpoint;

use super::programs::{Gpt, Program};
use super::{once, turn};

type Alone = Autodiff<Remat<Meta>>;
type Ranks = Sharded<Autodiff<Remat<Meta>>>;

pub const WIDTH: usize = 512;
/// Elements of all layers.
pub const PARAMETERS: u64 = 4 * (512 * 512 + 512);
const BUCKET: usize = 1 << 18;

/// Layers whose activations are next to nothing.
pub struct Layers;

impl Program for Layers {
    type Model<B: AutodiffBackend> = Vec<Linear<B>>;

    fn model<B: AutodiffBackend>(&self, device: &B::Device) -> Vec<Linear<B>> {
        let layer = |_| LinearConfig::new(WIDTH, WIDTH).init(device);
        (0..4).map(layer).collect()
    }

    fn loss<B: AutodiffBackend>(&self, model: &Vec<Linear<B>>, device: &B::Device) -> Tensor<B, 1> {
        let x = Tensor::<B, 2>::zeros([4, WIDTH], device);
        let y = model.iter().fold(x, |x, layer| layer.forward(x));
        y.sum()
    }
}

/// Where AdamW and, at stage 3, a rank's shards of the parameters are.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    adamw: Memory,
    shards: Memory,
}

impl Places {
    /// Shards in host memory.
    pub fn of(offload: bool) -> Self {
        let adamw = if offload {
            Memory::Host
        } else {
            Memory::Device
        };
        Self {
            adamw,
            shards: Memory::Host,
        }
    }
}

fn settings(stage: Stage) -> ZeroSettings {
    ZeroSettings {
        bucket_elements: BUCKET,
        ..ZeroSettings::stage(stage)
    }
}

/// Calls `run` with a prepared model and its step on a device.
fn with_step<B, P, O, R>(
    program: &P,
    device: &B::Device,
    adamw: O,
    group: Arc<dyn ProcessGroup>,
    settings: ZeroSettings,
    run: impl FnOnce(P::Model<B>, &mut dyn FnMut(P::Model<B>) -> P::Model<B>) -> R,
) -> R
where
    B: AutodiffBackend,
    P: Program,
    O: Optimizer<ParameterShards<B>, B> + 'static,
{
    let update = Update::new(adamw).reduce(settings, group);
    let mut update = update.expect("ranks agree");
    let model = update.prepare(program.model::<B>(device));
    run(model.expect("AdamW can be sharded"), &mut |model| {
        let gradients = program.loss(&model, device).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        let updated = update.step(1e-3, model, gradients);
        updated.unwrap_or_else(|error| panic!("{error}"))
    })
}

fn simulated<B: AutodiffBackend<Device = MetaDevice>>(
    program: &impl Program,
    stage: Stage,
    (rank, world_size): (usize, usize),
    places: Places,
) -> Estimate {
    let group = Arc::new(SimulatedRank::new(rank, world_size).expect("a rank of some"));
    let sent = || group.traffic().of_tensors().data_bytes;
    let device = MetaDevice::default();
    with_rank::<B, _, _>(
        program,
        &device,
        stage,
        group.clone(),
        places,
        |model, step| estimate_rank::<B, _>(device, sent, model, step).0,
    )
}

/// [`with_step`] of a rank with AdamW on the device or on the host; at stage 3 of one rank on the
/// host its parameters are there too.
pub fn with_rank<B: AutodiffBackend, P: Program, R>(
    program: &P,
    device: &B::Device,
    stage: Stage,
    group: Arc<dyn ProcessGroup>,
    places: Places,
    run: impl FnOnce(P::Model<B>, &mut dyn FnMut(P::Model<B>) -> P::Model<B>) -> R,
) -> R {
    let settings = ZeroSettings {
        shards: places.shards,
        ..settings(stage)
    };
    if places.adamw == Memory::Device {
        let adamw = AdamWConfig::new().init::<B, ParameterShards<B>>();
        return with_step(program, device, adamw, group, settings, run);
    }
    let adamw = OffloadConfig::new(HostAdamWConfig::default()).init();
    let settings = ZeroSettings {
        gradients: Memory::Host,
        parameters: match (stage, group.world_size()) {
            (Stage::Parameters, 1) => Memory::Host,
            _ => Memory::Device,
        },
        ..settings
    };
    let adamw = adamw.expect("it is valid");
    with_step::<B, _, _, _>(program, device, adamw, group, settings, run)
}

/// The bytes that the first of real ranks sends for an update.
fn real(stage: Stage, world_size: usize) -> u64 {
    let sent = ThreadGroup::spawn(world_size, GroupOptions::default(), |group| {
        let shared: Arc<dyn ProcessGroup> = Arc::new(group.clone());
        type B = Sharded<Autodiff<Remat<Flex>>>;
        let adamw = AdamWConfig::new().init::<B, ParameterShards<B>>();
        let device = Default::default();
        with_step(
            &Layers,
            &device,
            adamw,
            shared,
            settings(stage),
            |model, step| {
                let before = group.traffic().of_tensors().data_bytes;
                step(model);
                group.traffic().of_tensors().data_bytes - before
            },
        )
    });
    sent.expect("ranks work")[0]
}

fn within_2_percent(what: &str, found: u64, formula: f64) {
    let ratio = found as f64 / formula;
    println!("{what}: {found}, {ratio:.4} of what is expected");
    assert!((0.98..=1.02).contains(&ratio), "{what}: {found}, {formula}");
}

#[test]
fn traffic_and_state_are_those_of_the_paper() {
    let _turn = turn();
    for world_size in [2, 8, 64, 1024] {
        for stage in Stage::WITH_WHOLE_PARAMETERS {
            let estimate = simulated::<Ranks>(&Layers, stage, (0, world_size), Places::of(false));
            let what = format!("{world_size} ranks, stage {stage:?}");
            // Section 7: 2 P in every stage up to 2, but for the part that is the rank's own.
            let parts = (world_size - 1) as f64 / world_size as f64;
            let formula = 2.0 * 4.0 * PARAMETERS as f64 * parts;
            within_2_percent(&format!("{what}, sent"), estimate.sent_bytes, formula);
            // Section 5: two moments of 4 bytes, over all ranks from stage 1 on.
            let shards = if stage.shards_optimizer_state() {
                world_size
            } else {
                1
            };
            let moments = 8.0 * PARAMETERS as f64 / shards as f64;
            let state = estimate.bytes_of(Kind::OptimizerState);
            within_2_percent(&format!("{what}, optimizer state"), state, moments);

            let config = ZeroConfig {
                stage,
                reduce_bucket_size: BUCKET as u64,
                ..ZeroConfig::default()
            };
            let said = burn_zero::estimate(&ModelStates::adam(PARAMETERS), &config, world_size);
            within_2_percent(
                "burn_zero::estimate",
                estimate.sent_bytes,
                said.sent_bytes as f64,
            );
        }
    }
}

/// A GPT of 1.3 billion parameters with one sequence of 1,024 tokens, every block recomputed.
struct Large;

impl Program for Large {
    type Model<B: AutodiffBackend> = GptModel<B>;

    fn model<B: AutodiffBackend>(&self, device: &B::Device) -> GptModel<B> {
        let mut config = GptConfig::new(1024, 24, 16, 2048).with_checkpoint(Checkpoint::Block);
        config.vocabulary = 50257;
        config.init(device)
    }

    fn loss<B: AutodiffBackend>(&self, model: &GptModel<B>, device: &B::Device) -> Tensor<B, 1> {
        let tokens = Tensor::<B, 2, Int>::zeros([1, 1024], device);
        model.loss(TokenBatch {
            inputs: tokens.clone(),
            targets: tokens,
        })
    }
}

/// What a rank holds and sends and how long its update takes, by stage and number of ranks: the
/// rows that `docs/results/stages_by_ranks.py` draws.
#[test]
fn stages_of_a_large_model() {
    let _turn = turn();
    let device = MetaDevice::cuda(1);
    let mut parameters = 0.0;
    let alone = once(&Large).run::<Alone, _>(&device, |model, step| {
        parameters = model.num_params() as f64;
        estimate_on::<Alone, _>(device, model, step).0
    });
    for stage in Stage::ALL {
        for ranks in [1, 2, 8, 64, 1024] {
            let rank = alone.shared(Shares {
                ranks,
                optimizer_state: stage.shards_optimizer_state() && ranks > 1,
                gradients: stage.shards_gradients() && ranks > 1,
                parameters: stage == Stage::Parameters && ranks > 1,
                bucket_bytes: 100 << 20,
                ..Shares::NONE
            });
            println!(
                "stage {}, {ranks} ranks: {} bytes at the peak, {} sent, {:.0} ms",
                stage as u8,
                rank.peak_bytes,
                rank.sent_bytes,
                rank.time(&DeviceProfile::A100).as_secs_f64() * 1e3
            );
            if ranks == 1 {
                continue;
            }
            // Section 7.2.2: parameters are gathered for forward and for backward.
            let times = if stage == Stage::Parameters { 3.0 } else { 2.0 };
            let parts = (ranks - 1) as f64 / ranks as f64;
            let what = format!("stage {stage:?}, {ranks} ranks");
            let formula = times * 4.0 * parameters * parts;
            within_2_percent(&format!("{what}, sent"), rank.sent_bytes, formula);
            // Section 5: parameters and moments when the step begins.
            let part = |is_shared: bool| if is_shared { ranks as f64 } else { 1.0 };
            let formula = match stage {
                Stage::Parameters => 8.0 * parameters / ranks as f64,
                _ => 4.0 * parameters + 8.0 * parameters / part(stage.shards_optimizer_state()),
            };
            within_2_percent(&format!("{what}, states"), rank.start_bytes, formula);
        }
    }
}

#[test]
fn traffic_is_that_of_real_ranks() {
    let _turn = turn();
    for world_size in 1..=4 {
        for stage in Stage::ALL {
            let simulated =
                simulated::<Ranks>(&Layers, stage, (0, world_size), Places::of(false)).sent_bytes;
            let real = real(stage, world_size);
            assert_eq!(simulated, real, "{world_size} ranks, {stage:?}");
        }
    }
}

/// What a planner asks for.
fn shares(stage: Stage, world_size: usize, places: Places) -> Shares {
    Shares {
        ranks: world_size as u64,
        optimizer_state: stage.shards_optimizer_state(),
        gradients: stage.shards_gradients(),
        parameters: stage == Stage::Parameters,
        shards_on_device: places.shards == Memory::Device,
        offload: places.adamw == Memory::Host,
        bucket_bytes: 4 * BUCKET as u64,
    }
}

/// What a planner derives from one run without ranks, against the runs with them.
fn derived_is_what_ranks_take<A, R>(name: &str, program: &impl Program, stages: &[Stage])
where
    A: AutodiffBackend<Device = MetaDevice>,
    R: AutodiffBackend<Device = MetaDevice>,
{
    let alone = once(program).estimate::<A>();
    let on_device = |offload| Places {
        shards: Memory::Device,
        ..Places::of(offload)
    };
    let mut cases = vec![
        (1, Places::of(true)),
        (2, Places::of(false)),
        (8, Places::of(false)),
        (8, Places::of(true)),
    ];
    // What they add depends on the parameters alone, so that the smallest program is enough.
    if name.ends_with("layers") {
        cases.extend([(2, on_device(false)), (2, on_device(true))]);
    }
    for (world_size, places) in cases {
        let shards_on_device = places.shards == Memory::Device;
        let stages = stages.iter().copied();
        for stage in stages.filter(|stage| !shards_on_device || *stage == Stage::Parameters) {
            let of_rank = |rank| simulated::<R>(program, stage, (rank, world_size), places);
            let run = of_rank(0);
            let shares = shares(stage, world_size, places);
            let derived = alone.shared(shares);
            let what = format!("{name}, {world_size} ranks, {stage:?}, {places:?}");
            // A rank's part of a unit may be more or less than that of others.
            let sent = match stage {
                Stage::Parameters => {
                    let sent = (0..world_size).map(|rank| of_rank(rank).sent_bytes);
                    sent.sum::<u64>() / world_size as u64
                }
                _ => run.sent_bytes,
            };
            let mut pairs = vec![
                ("up", derived.uploaded_bytes, run.uploaded_bytes),
                ("down", derived.downloaded_bytes, run.downloaded_bytes),
                ("sent", derived.sent_bytes, sent),
            ];
            match stage {
                // Of the three buckets that may be under way some have left: gathers wait for the
                // reductions before them.
                Stage::Parameters => {
                    let [derived, run] = [derived.peak_bytes, run.peak_bytes];
                    let most = run as f64 * 1.02 + 3.0 * 4.0 * BUCKET as f64;
                    println!("{what}, peak: {derived}, of a run {run}");
                    assert!(
                        derived as f64 >= run as f64 * 0.98,
                        "{what}: {derived}, {run}"
                    );
                    assert!(derived as f64 <= most, "{what}: {derived}, {run}");
                }
                // A run without data reads at once: nothing is under way to the host.
                _ => {
                    let at_once = Shares {
                        bucket_bytes: 0,
                        ..shares
                    };
                    let peak_bytes = alone.shared(at_once).peak_bytes;
                    pairs.push(("peak", peak_bytes, run.peak_bytes));
                    let most = peak_bytes + 3 * 4 * BUCKET as u64;
                    assert!((peak_bytes..=most).contains(&derived.peak_bytes), "{what}");
                }
            }
            for (name, derived, run) in pairs {
                if (derived, run) != (0, 0) {
                    within_2_percent(&format!("{what}, {name}"), derived, run as f64);
                }
            }
        }
    }
}

#[test]
fn what_is_derived_from_a_run_without_ranks_is_what_ranks_take() {
    let _turn = turn();
    let stages = Stage::ALL.to_vec();
    derived_is_what_ranks_take::<Alone, Ranks>("gpt", &Gpt::new(6, Checkpoint::None), &stages);
    let blocks = Gpt::new(6, Checkpoint::Block);
    derived_is_what_ranks_take::<Alone, Ranks>("gpt, blocks recomputed", &blocks, &stages);
    derived_is_what_ranks_take::<Alone, Ranks>("layers", &Layers, &stages);
}

/// Parameters are gathered and uploaded in the low type.
#[test]
fn so_it_is_under_autocast_at_stage_3() {
    let _turn = turn();
    let stages = [Stage::Parameters];
    let gpt = Gpt::new(6, Checkpoint::None);
    derived_is_what_ranks_take::<Autocast<Alone>, Autocast<Ranks>>("bf16 gpt", &gpt, &stages);
    derived_is_what_ranks_take::<Autocast<Alone>, Autocast<Ranks>>("bf16 layers", &Layers, &stages);
}

/// A rank's shards are on the device in the low type too. Of so small a program three buckets would
/// hide that: none is under way in a run without data.
#[test]
fn the_low_type_of_shards_on_the_device_counts() {
    let _turn = turn();
    let alone = once(&Layers).estimate::<Autocast<Alone>>();
    let shards = Memory::Device;
    let cases = [(2, Memory::Device), (4, Memory::Device), (2, Memory::Host)];
    for (ranks, adamw) in cases {
        let places = Places { adamw, shards };
        let run = simulated::<Autocast<Ranks>>(&Layers, Stage::Parameters, (0, ranks), places);
        let derived = alone.shared(Shares {
            bucket_bytes: 0,
            ..shares(Stage::Parameters, ranks, places)
        });
        let what = format!("{ranks} ranks, {places:?}, peak");
        within_2_percent(&what, derived.peak_bytes, run.peak_bytes as f64);
    }
}

/// As with LoRA: what is not trained is neither reduced nor sharded.
#[test]
fn frozen_parameters_send_nothing() {
    let _turn = turn();
    let device = MetaDevice::new(13);
    let sent_bytes = |with_frozen: bool| {
        let linear = || LinearConfig::new(64, 64).with_bias(false).init(&device);
        let (trained, frozen): (_, Option<Linear<Alone>>) =
            (linear(), with_frozen.then(|| linear().no_grad()));
        let mut optimizer = AdamWConfig::new().init();
        let (alone, _) = estimate_on::<Alone, _>(device, (trained, frozen), |model| {
            let x = Tensor::<Alone, 2>::ones([4, 64], &device);
            let y = model.0.forward(x);
            let y = model.1.iter().fold(y, |y, frozen| frozen.forward(y));
            let gradients = GradientsParams::from_grads(y.mean().backward(), &model);
            optimizer.step(1e-3, model, gradients)
        });
        let shares = Shares {
            ranks: 8,
            optimizer_state: true,
            gradients: true,
            ..Shares::NONE
        };
        alone.shared(shares).sent_bytes
    };
    assert_eq!(sent_bytes(true), sent_bytes(false));
    assert_eq!(sent_bytes(false), 2 * (64 * 64 * 4) * 7 / 8);
}
