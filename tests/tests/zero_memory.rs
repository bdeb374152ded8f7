//! A GPT that does not fit a rank unless gradients are sharded. The allocator counts the bytes, so
//! the test is alone in its process.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor};
use burn_checkpoint::Remat;
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::{
    GroupOptions, HostAdamWConfig, Memory, ModelStates, OffloadConfig, ParameterShards,
    ProcessGroup, ReduceOverRanks, Sharded, Stage, ThreadGroup, ZeroConfig, estimate,
};
use examples::gpt::model::{Gpt, GptConfig};
use peak_alloc::PeakAlloc;

type B = Sharded<Autodiff<Remat<Flex>>>;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const RANKS: usize = 8;
const TIME: usize = 4;
const VOCABULARY: usize = 32;
const FLOAT_BYTES: usize = 4;
/// The bytes that a rank may hold for each byte of its parameters: parameters, unsharded gradients
/// and the shard of the optimizer's state exceed it.
const LIMIT: f64 = 2.2;

fn loss<B: AutodiffBackend>(model: &Gpt<B>) -> Tensor<B, 1> {
    let device = Default::default();
    let tokens = Tensor::<B, 1, Int>::arange(0..TIME as i64 + 1, &device);
    let logits = model.forward(tokens.clone().narrow(0, 0, TIME).reshape([1, TIME]));
    let logits = logits.reshape([TIME, VOCABULARY]);
    let loss = CrossEntropyLossConfig::new().init(&device);
    loss.forward(logits, tokens.narrow(0, 1, TIME))
}

fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig {
        stage,
        reduce_bucket_size: 10_000,
        ..ZeroConfig::default()
    }
}

/// What a forward and backward pass takes beside the gradients, on a thread of its own as a rank
/// has: activations, and the workspace of this machine's kernels, which is as large as a core's
/// cache. In bytes for each byte of the parameters.
fn pass_beside_gradients(config: &GptConfig) -> f64 {
    let model = config.init::<Autodiff<Remat<Flex>>>(&Default::default());
    let parameters = model.num_params();
    let pass = || {
        let before = HEAP.current_usage();
        HEAP.reset_peak_usage();
        drop(loss(&model).backward());
        HEAP.peak_usage().saturating_sub(before)
    };
    let peak = std::thread::scope(|threads| threads.spawn(pass).join().expect("no panic"));
    let beside = peak as f64 / (parameters * FLOAT_BYTES) as f64 - 1.0;
    println!("a pass takes {beside:.2} beside the gradients");
    assert!(beside > 0.0, "{beside}");
    beside
}

/// Trains. Returns the peak of a rank, in bytes for each byte of its parameters, measured and
/// beyond the estimate, and the first and the last loss.
fn train<O: Optimizer<ParameterShards<B>, B> + 'static>(
    initial: &Gpt<B>,
    config: &ZeroConfig,
    optimizer: impl Fn() -> O + Sync,
) -> ([f64; 2], [f32; 2]) {
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let trained = ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
        let group: Arc<dyn ProcessGroup> = Arc::new(group);
        let mut update = Update::new(optimizer()).reduce(config.settings(), group.clone())?;
        let mut model = update.prepare(initial.clone())?;
        group.barrier("the model is there")?;
        let mut losses = Vec::new();
        for _ in 0..4 {
            let loss = loss(&model);
            losses.push(loss.clone().into_scalar());
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = update.step(1e-3, model, gradients)?;
            group.barrier("the step is done")?;
        }
        Ok::<_, UpdateError>((model.num_params(), [losses[0], losses[3]]))
    });
    let peak = HEAP.peak_usage().saturating_sub(before);
    let (parameters, losses) = trained.expect("ranks end").swap_remove(0).expect("trained");
    let bytes = RANKS * parameters * FLOAT_BYTES;
    let said = estimate(&ModelStates::of::<B, _>(initial), config, RANKS);
    // State that is offloaded lies in mappings of its own, not in the heap.
    let said = (said.peak_device_bytes() + said.host_parameter_bytes + said.unit_bytes) as f64;
    let said = said / (parameters * FLOAT_BYTES) as f64;
    let measured = peak as f64 / bytes as f64;
    println!(
        "{}, state: {:?}, bytes a rank for each of its parameters: {measured:.2}, estimated {said:.2}",
        config.stage, config.offload_optimizer
    );
    ([measured, measured - said], losses)
}

#[test]
fn a_gpt_trains_within_a_limit_that_it_exceeds_without_stage_two() {
    let gpt = GptConfig::new(TIME, 6, 4, 192).with_vocabulary(VOCABULARY);
    let initial = gpt.init::<B>(&Default::default());
    let beside = pass_beside_gradients(&gpt);
    let adam = || AdamWConfig::new().init();
    let [zero, one, two] =
        Stage::WITH_WHOLE_PARAMETERS.map(|stage| train(&initial, &config(stage), adam));
    let three = train(&initial, &config(Stage::Parameters), adam);
    let on_host = ZeroConfig {
        offload_optimizer: Memory::Host,
        ..config(Stage::Parameters)
    };
    let on_host = train(&initial, &on_host, || {
        let adam = OffloadConfig::new(HostAdamWConfig::default());
        adam.init().expect("it is the default")
    });
    let [peaks, beyond] = [0, 1].map(|of| [&zero, &one, &two, &three, &on_host].map(|it| it.0[of]));
    assert!(
        peaks[0] > 3.9 && peaks[1] > LIMIT && peaks[2] - beside < LIMIT,
        "{peaks:?}"
    );
    // Parameters are sharded too: a rank has an eighth of them, two units of six, and the buffer in
    // which one arrives. And the optimizer's state leaves the heap.
    let left = 1.0 / RANKS as f64 + 3.0 / 6.0;
    assert!(peaks[3] < peaks[2] - 1.0 + left, "{peaks:?}");
    assert!(peaks[4] < peaks[3], "{peaks:?}");
    // What is counted is there, if not all ranks are at their peak at the same time. Beyond it
    // there is what a pass takes, and on the host an update has buffers of its own.
    for (more, buffers) in beyond.into_iter().zip([0.1, 0.1, 0.1, 0.1, 0.25]) {
        assert!(
            (-0.05..beside + buffers).contains(&more),
            "{beyond:?}, a pass {beside}"
        );
    }
    let [first, last] = two.1;
    assert!(last < first, "it learns: {first} {last}");
    assert_eq!(three.1, two.1);
    assert_eq!(two.1, one.1);
    assert_eq!(two.1, zero.1);
}
