//! Law: the thread that trains waits for no read of a gradient while backward or an update has work
//! to launch, also on a backend whose reads wait at their first poll.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_checkpoint::Remat;
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{
    GroupOptions, HostAdamWConfig, Memory, OffloadConfig, ParameterShards, ProcessGroup,
    ReduceOverRanks, Sharded, SingleRank, Stage, ThreadGroup, ZeroSettings,
};
use tests::compare::values;
use tests::queue::{Answers, Queue, answer_reads, reads_so_far, take_counts, take_readers};

type Plain = Autodiff<Queue<Flex>>;
type B = Sharded<Autodiff<Remat<Queue<Flex>>>>;
type Model<B> = Vec<Linear<B>>;

const LAYERS: usize = 6;

fn model<B: Backend>() -> Model<B> {
    let layer = |index| Linear {
        weight: Param::from_tensor(Tensor::full(
            [4, 4],
            0.1 * index as f32,
            &Default::default(),
        )),
        bias: None,
    };
    (1..=LAYERS).map(layer).collect()
}

fn loss<B: Backend>(model: &Model<B>) -> Tensor<B, 1> {
    let x = Tensor::<B, 2>::ones([2, 4], &Default::default());
    let y = model.iter().fold(x, |x, layer| layer.forward(x).tanh());
    y.sum()
}

/// Trains some steps. With `late`, no read of a backward pass is answered before the pass has
/// launched all of its operations. Returns the weights.
fn train<B: AutodiffBackend>(
    mut model: Model<B>,
    mut optimizer: impl Optimizer<Model<B>, B>,
    late: bool,
) -> Vec<Vec<f32>>
where
    Model<B>: AutodiffModule<B>,
{
    let mut launches = None;
    for _ in 0..3 {
        let loss = loss(&model);
        take_counts();
        take_readers();
        if let Some(launches) = launches.filter(|_| late) {
            answer_reads(Answers::Launched(launches));
        }
        let gradients = loss.backward();
        answer_reads(Answers::AtOnce);
        let counted = take_counts().launches;
        assert_eq!(
            *launches.get_or_insert(counted),
            counted,
            "each step is the same"
        );
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(0.1, model, gradients);
        let (own, readers) = (thread::current().id(), take_readers());
        assert!(!readers.is_empty(), "gradients are read");
        assert!(!readers.contains(&own), "this thread waited for a read");
    }
    let weights = model.iter().map(|layer| values(layer.weight.val()));
    weights.collect()
}

/// An update over the ranks of `group`, and the model that it has prepared.
fn over(
    group: Arc<dyn ProcessGroup>,
    settings: ZeroSettings,
    optimizer: impl Optimizer<ParameterShards<B>, B> + 'static,
    model: Model<B>,
) -> (Model<B>, Update<Model<B>, B>) {
    let update = Update::new(optimizer).reduce(settings, group);
    let mut update = update.expect("one setting");
    (update.prepare(model).expect("a model"), update)
}

#[test]
fn backward_launches_all_before_any_gradient_is_read() {
    let settings = |stage, gradients| ZeroSettings {
        gradients,
        ..ZeroSettings::stage(stage)
    };
    let ranks = |settings: &ZeroSettings, late| {
        let trained = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
            let group: Arc<dyn ProcessGroup> = Arc::new(group);
            let (model, update) = over(group, settings.clone(), SgdConfig::new().init(), model());
            train(model, update, late)
        });
        trained.expect("ranks end").swap_remove(0)
    };
    for stage in [Stage::DataParallel, Stage::OptimizerState, Stage::Gradients] {
        for memory in [Memory::Device, Memory::Host] {
            let settings = settings(stage, memory);
            let expected = ranks(&settings, false);
            assert_eq!(ranks(&settings, true), expected, "{stage}, {memory:?}");
        }
    }
}

/// The error of what panics with one.
fn error_of<R>(work: impl FnOnce() -> R) -> String {
    let panic = catch_unwind(AssertUnwindSafe(work)).map(drop);
    let panic = panic.expect_err("the device is lost");
    *panic.downcast::<String>().expect("a message")
}

#[test]
fn a_gradient_that_cannot_be_read_is_named_and_the_next_step_is_right() {
    let adamw = || {
        let config = OffloadConfig::new(HostAdamWConfig::default());
        config.init().expect("valid")
    };
    let expected = {
        let (model, mut optimizer) = (model::<B>(), adamw());
        optimizer.prepare(&model);
        train(model, optimizer, false)
    };
    let (own, mut optimizer) = (model::<B>(), adamw());
    optimizer.prepare(&own);
    let lost = loss(&own);
    answer_reads(Answers::Never);
    let error = error_of(|| lost.backward());
    answer_reads(Answers::AtOnce);
    assert_eq!(
        error,
        "the gradient of 0.weight cannot be read from its device: the backend panicked"
    );
    assert_eq!(train(own, optimizer, false), expected);

    let ranks = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let (rank, group): (_, Arc<dyn ProcessGroup>) = (group.rank(), Arc::new(group));
        let settings = ZeroSettings::stage(Stage::Gradients);
        let (model, _update) = over(group, settings, SgdConfig::new().init(), model());
        let lost = loss(&model);
        if rank == 0 {
            answer_reads(Answers::Never);
        }
        drop(lost.backward());
    });
    let error = ranks.expect_err("a rank cannot read").to_string();
    // A bucket of all gradients names the first of those that its collective needs.
    let mut named =
        (0..LAYERS).map(|layer| format!("the gradient of {layer}.weight cannot be read"));
    assert!(named.any(|named| error.contains(&named)), "{error}");
}

#[test]
fn an_optimizer_on_the_host_reads_apart_from_the_thread_that_trains() {
    let adamw = || {
        let config = OffloadConfig::new(HostAdamWConfig::default());
        config.init().expect("valid")
    };
    // Read in the step, where nothing leaves during backward.
    let expected = train::<Plain>(model(), adamw(), true);
    let alone = |late| {
        let (model, mut optimizer) = (model::<B>(), adamw());
        optimizer.prepare(&model);
        train(model, optimizer, late)
    };
    assert_eq!(alone(false), expected);
    assert_eq!(alone(true), expected);
    let settings = ZeroSettings {
        gradients: Memory::Host,
        ..ZeroSettings::default()
    };
    let group = Arc::new(SingleRank::new());
    let (model, update) = over(group, settings, adamw(), model());
    assert_eq!(train(model, update, true), expected);
}

/// The reads of a step of layers of 256 KiB each, after the first step.
fn reads_of_a_step(mut model: Model<B>, mut optimizer: impl Optimizer<Model<B>, B>) -> u64 {
    let mut before = 0;
    for _ in 0..2 {
        before = reads_so_far();
        let x = Tensor::<B, 2>::ones([2, WIDE], &Default::default());
        let y = model.iter().fold(x, |x, layer| layer.forward(x).tanh());
        let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
        model = optimizer.step(0.1, model, gradients);
    }
    reads_so_far() - before
}

const WIDE: usize = 256;

fn wide() -> Model<B> {
    let config = LinearConfig::new(WIDE, WIDE).with_bias(false);
    let layers = (0..LAYERS).map(|_| config.init(&Default::default()));
    layers.collect()
}

/// Each read waits for the device.
#[test]
fn a_step_reads_each_gradient_once_and_nothing_else() {
    let bucket_elements = 2 * WIDE * WIDE;
    let adamw = OffloadConfig {
        bucket_elements,
        ..OffloadConfig::new(HostAdamWConfig::default())
    };
    let (model, mut adamw) = (wide(), adamw.init().expect("valid"));
    adamw.prepare(&model);
    assert_eq!(reads_of_a_step(model, adamw), LAYERS as u64);
}

#[test]
fn gradients_that_are_reduced_in_the_step_are_read_a_bucket_at_a_time_and_updated_shards_at_once() {
    let reads = |stage| {
        let ranks = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
            let settings = ZeroSettings {
                bucket_elements: 2 * WIDE * WIDE,
                ..ZeroSettings::stage(stage)
            };
            let sgd = SgdConfig::new().init();
            let (model, update) = over(Arc::new(group), settings, sgd, wide());
            reads_of_a_step(model, update)
        });
        ranks.expect("ranks end")
    };
    let buckets = LAYERS as u64 / 2;
    assert_eq!(reads(Stage::DataParallel), [buckets; 2]);
    assert_eq!(reads(Stage::OptimizerState), [buckets + 1; 2]);
}
