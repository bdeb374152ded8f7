//! The blocks, each in a context in which it compiles. Nothing here is run.
#![allow(dead_code, unused_mut, unused_variables, clippy::new_ret_no_self, clippy::redundant_clone, clippy::clone_on_copy, reason = "compiled only")]

use std::error::Error;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::Dataset;
use burn::module::{AutodiffModule, Module};
use burn::nn::{Linear, RmsNorm};
use burn::nn::loss::{CrossEntropyLossConfig, Reduction};
use burn::optim::{AdamConfig, AdamWConfig, GradientsParams, MuonConfig, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Device, Int, Tensor};
use burn::train::logger::FileMetricLogger;
use burn::train::metric::{AccuracyMetric, LearningRateMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_accum::{AccumConfig, ClipByNorm, Counted, MicroBatchSearch, find_micro_batch, rehearse};
use burn_amp::{Autocast, Configured, F16, F32, GradScaler, GradScalerConfig, Watch, autocast, explain_overflow};
use burn_checkpoint::{MemoryBudget, Policy, Remat, checkpoint, checkpoint_listing, checkpoint_units};
use burn_fused::{FusedBackward, LinearCrossEntropy, LinearCrossEntropyLossConfig, rms_norm, swiglu};
use burn_estimate::{DeviceMemory, Meta, MetaDevice, estimate_on, estimate_rank};
use burn_tensorboard::TensorBoard;
use burn_update::{AverageConfig, Group, Groups, Paths, Update};
use burn_zero::{
    DeepSpeedConfig, DistributedSampler, FromDeepSpeed, HostAdamWConfig, OffloadConfig, OffloadedAdamW, ProcessGroup, RankReduction, ReduceOverRanks, SampledLoader, Sharded, SimulatedRank, Stage,
    ZeroSettings, offload_parameters,
};
use burn_ranks::local_rank;

/// The device of the tests in place of a GPU.
type Cuda = burn_flex::Flex;
type LibTorch = burn_flex::Flex;
type Mended<B> = B;
type Done = Result<(), Box<dyn Error>>;

struct CudaDevice;

impl CudaDevice {
    fn new(_: usize) -> Device<Cuda> {
        Default::default()
    }
}

#[derive(Clone, Debug)]
struct Batch<B: Backend> {
    inputs: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
}

type Output<B> = ClassificationOutput<B>;
type Inner<B> = <B as AutodiffBackend>::InnerBackend;
type Loader<B> = Arc<dyn DataLoader<B, Batch<B>>>;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    blocks: Vec<Linear<B>>,
    head: Linear<B>,
}

struct Config;

impl Config {
    fn init<B: Backend>(&self, _: &Device<B>) -> Model<B> {
        unreachable!("not run")
    }
}

impl<B: Backend> Model<B> {
    fn classify(&self, batch: Batch<B>) -> Output<B> {
        let output = self.forward(batch.inputs);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.targets.clone());
        ClassificationOutput::new(loss, output, batch.targets)
    }

    fn loss(&self, batch: Batch<B>) -> Tensor<B, 1> {
        self.classify(batch).loss
    }

    fn forward(&self, mut x: Tensor<B, 2>) -> Tensor<B, 2> {
        for block in &self.blocks {
            x = checkpoint(|| block.forward(x));
        }
        self.head.forward(x)
    }
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Batch<B>;
    type Output = Output<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<Output<B>> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Batch<B>;
    type Output = Output<B>;

    fn step(&self, batch: Batch<B>) -> Output<B> {
        self.classify(batch)
    }
}

mod readme {
    use super::*;

type B = Autocast<Autodiff<Cuda>>;                                   // was: Autodiff<Cuda>; trains in bf16
type Full = Autocast<Sharded<FusedBackward<Autodiff<Remat<Cuda>>>>>; // everything at once
}

fn burn_amp() -> Done {
type B = Autocast<Autodiff<Cuda>>;          // was: Autodiff<Cuda>; trains in bf16
type Half = Autocast<Autodiff<Cuda>, F16>;  // for devices without bf16, with a loss scale:

let optimizer = Update::new(AdamWConfig::new().init()).scale(GradScalerConfig::default())?;

    optimizes::<B>(&optimizer);
    Ok(())
}

fn optimizes<B: AutodiffBackend>(_: &impl Optimizer<Model<B>, B>) {}

fn burn_accum<B: AutodiffBackend>() -> Done {
let update = Update::new(AdamWConfig::new().init()).accumulate(AccumConfig::mean(8))?; // was: AdamWConfig::new().init()

    optimizes::<B>(&update);
    Ok(())
}

fn burn_update<B: AutodiffBackend>(mut model: Model<B>, loss: Tensor<B, 1>, lr: f64) -> Done {
let mut update = Update::new(AdamWConfig::new().init()).clip_norm(1.0)?.accumulate(AccumConfig::mean(4))?.scale(GradScalerConfig::default())?;
// in a loop of your own:
let gradients = update.backward(&model, loss);
model = update.step(lr, model, gradients)?;

    drop(model);
    Ok(())
}

fn burn_update_in_the_learner(update: Update<Model<Base>, Base>, model: Model<Base>, train: Loader<Base>, valid: Loader<Cuda>) -> Done {
    let schedule = 1e-3;

let strategy = update.strategy().until_updates(10_000).validate_every(500)?; // without: by epochs, as Burn
let schedule = update.per_update(schedule);
SupervisedTraining::new("run", train, valid)
    .metrics(strategy.metrics())
    .with_training_strategy(strategy.into())
    .launch(Learner::new(model, update, schedule));

    Ok(())
}

fn burn_update_groups<B: AutodiffBackend>(in_blocks: fn(&str, &[usize]) -> bool) {
    let adamw = AdamWConfig::new();
    let no_decay = AdamWConfig::new().with_weight_decay(0.0);

let groups = Groups::new(adamw.init()) // the rest
    .with("no decay", Group::new(Paths::glob("*.bias").or_glob("*norm*"), no_decay.init()))
    .with("matrices", Group::new(Paths::when("matrices of blocks", in_blocks), MuonConfig::new().init()).with_lr_factor(20.0))
    .with("embedding", Group::frozen(Paths::glob("embedding.*")));
let update = Update::of_groups(groups);

    optimizes::<B>(&update);
}

fn burn_checkpoint(block: Linear<Autodiff<Remat<Cuda>>>, mut x: Tensor<Autodiff<Remat<Cuda>>, 2>) -> Done {
type B = Autodiff<Remat<Cuda>>;                          // was: Autodiff<Cuda>

x = checkpoint(|| block.forward(x));                     // this block is recomputed in backward,
let _budget = MemoryBudget::fraction(0.4)?.install();    // or nothing is annotated, and 40 % of the memory is enough

    let _: Tensor<B, 2> = x;
    Ok(())
}

type Base = Autodiff<Cuda>;

fn burn_tensorboard(model: Model<Base>, train: Loader<Base>, valid: Loader<Cuda>) -> Done {
let logger = TensorBoard::new(FileMetricLogger::new("run"), "run/tensorboard")?;
let training = SupervisedTraining::new("run", train, valid)
    .metrics((LossMetric::new(), LearningRateMetric::new(), AccuracyMetric::new()))
    .with_metric_logger(logger);

    training.launch(Learner::new(model, AdamWConfig::new().init(), 1e-3));
    Ok(())
}

fn burn_zero(model: Model<Sharded<Base>>, train: Loader<Sharded<Base>>, valid: Loader<Inner<Sharded<Base>>>) -> Done {
    let training = SupervisedTraining::new("run", train, valid);

type B = Sharded<Autodiff<Cuda>>;                                                       // was: Autodiff<Cuda>

let settings = ZeroSettings::stage(Stage::Gradients);
let update = Update::new(AdamWConfig::new().init()).reduce_in_learner(settings)?;       // was: AdamWConfig::new().init()
let training = training.with_training_strategy(update.strategy().threads(4).into());    // or .process(group), under mpirun and srun

    training.launch(Learner::new(model, update, 1e-3));
    Ok(())
}

fn burn_zero_on_one_device() -> Result<OffloadedAdamW, Box<dyn Error>> {
let optimizer = OffloadConfig::new(HostAdamWConfig::default()).init()?; // was: AdamWConfig::new().init()

    Ok(optimizer)
}

mod checkpointing {
    use super::*;

    type B = Autodiff<Remat<Cuda>>;

    fn scopes(model: &Model<B>, mut x: Tensor<B, 2>) -> Tensor<B, 2> {
        struct Blocks { blocks: Vec<Linear<B>> }
        impl Blocks {
            fn forward(&self, mut x: Tensor<B, 2>) -> Tensor<B, 2> {
for block in &self.blocks {
    x = checkpoint(|| block.forward(x));
}
                x
            }
        }
        Blocks { blocks: model.blocks.clone() }.forward(x)
    }

    fn budgets() -> Done {
let budget = MemoryBudget::bytes(8 << 30).install();      // until dropped, on every thread
let budget = MemoryBudget::fraction(0.4)?.install();      // of what the first step takes, which runs unconstrained

        drop(budget);
        Ok(())
    }
}

mod accumulation {
    use super::*;

    fn learner(model: Model<Base>, train: Loader<Base>, valid: Loader<Cuda>, directory: &str) -> Done {
        let schedule = 1e-3;

let update = Update::new(AdamWConfig::new().init()).accumulate(AccumConfig::mean(8))?;
let schedule = update.per_update(schedule);

SupervisedTraining::new(directory, train, valid)
    .with_training_strategy(update.strategy().into())
    .launch(Learner::new(model, update, schedule));

        Ok(())
    }

    fn clipping(scaler: GradScaler) -> Done {
let update = Update::new(AdamWConfig::new().init())
    .clip_norm(1.0)?
    .accumulate(AccumConfig::mean(8))?
    .scale(scaler)?;

        optimizes::<Base>(&update);
        Ok(())
    }

    type B = Base;

    fn search(device: Device<B>, limit_bytes: u64, mut probe: impl burn_accum::MemoryProbe, batch: fn(usize) -> Batch<B>) -> Done {
        let model = || Config.init::<B>(&device);
        let update = || Update::new(AdamWConfig::new().init());
        let adam_w = AdamWConfig::new().init();

let search = MicroBatchSearch::new(64, limit_bytes);
let found = find_micro_batch::<B, _>(&search, &device, &mut probe, |micro_batch| rehearse(model(), update(), || batch(micro_batch)))?;
println!("{found}");                                        // what was tried
let update = Update::new(adam_w).accumulate(found.config()?)?; // the window that keeps the effective batch

        optimizes::<B>(&update);
        Ok(())
    }
}

mod libtorch {
    use super::*;

type B = Autocast<FusedBackward<Autodiff<Remat<Mended<LibTorch>>>>>;
}

mod fused {
    use super::*;

type B = Autocast<FusedBackward<Autodiff<Remat<Cuda>>>>;
}

mod recorded {
    use super::*;
    use burn_checkpoint::name_parameters;
    use burn_checkpoint::snapshot::Snapshot;

    type B = Autodiff<Remat<Cuda>>;

    fn step(model: Model<B>) -> Model<B> {
        model
    }

    fn record(model: Model<B>) {
let recording = burn_checkpoint::record_all(); // every tensor of this thread, with and without scopes
let model = step(name_parameters(model));      // holders have the name of the parameter in use
let events = recording.finish();
println!("{}", Snapshot::at_peak(&events).expect("there were tensors"));
    }
}

mod linear_cross_entropy {
    use super::*;

    type B = Autodiff<Remat<Cuda>>;

    impl Model<B> {
        fn of_hidden(&self, hidden: Tensor<B, 2>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
// was: CrossEntropyLossConfig::new().init(&device).forward(self.head.forward(hidden), targets)
let bias = self.head.bias.as_ref().map(|bias| bias.val());
LinearCrossEntropyLossConfig::new().init().forward(hidden, self.head.weight.val(), bias, targets)
        }

        fn counted(&self, hidden: Tensor<B, 2>, weight: Tensor<B, 2>, targets: Tensor<B, 1, Int>, output: Output<B>) -> TrainOutput<Output<B>> {
let loss = LinearCrossEntropyLossConfig::new().with_ignore_index(Some(-100)).with_reduction(Reduction::Sum).init();
let LinearCrossEntropy { loss, items } = loss.forward_counted(hidden, weight, None, targets);
Counted::sum(loss, items).output(self, output)
        }
    }
}

mod llama_block {
    use super::*;

    struct Block<B: Backend> {
        norm: RmsNorm<B>,
        gate: Linear<B>,
        up: Linear<B>,
        down: Linear<B>,
    }

    impl<B: Backend> Block<B> {
        fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
let x = rms_norm(x, self.norm.gamma.val(), self.norm.epsilon);          // was: self.norm.forward(x)
let x = self.down.forward(swiglu(self.gate.forward(x.clone()), self.up.forward(x))); // was: silu(gate) * up
            x
        }
    }
}

mod mixed_precision {
    use super::*;

    #[derive(Module, Debug)]
    struct Classifier<B: Backend> {
        model: Model<B>,
    }

    impl<B: Backend> Classifier<B> {
        fn classify(&self, batch: Batch<B>) -> Output<B> {
            self.model.classify(batch)
        }
    }

type B = Autocast<Autodiff<Watch<Cuda>>, F16>;

impl TrainStep for Classifier<B> {
    type Input = Batch<B>;
    type Output = Output<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<Output<B>> {
        explain_overflow(self, batch, |model, batch| {
            let output = model.classify(batch);
            TrainOutput::new(model, output.loss.backward(), output)
        })
    }
}
}

mod out_of_memory {
    use super::*;

    type Step = Autocast<Autodiff<Remat<Meta>>>;

    fn estimate<O: Optimizer<Model<Step>, Step>>(model: Model<Step>, batch: Batch<Step>, mut optimizer: O) {
type B = Autocast<Autodiff<Remat<Meta>>>;

let device = MetaDevice::cuda(0); // that of the model and the batch
let (estimate, model) = estimate_on::<B, _>(device, model, |model| {
    let grads = GradientsParams::from_grads(model.loss(batch.clone()).backward(), &model);
    optimizer.step(1e-4, model, grads)
});
println!("{estimate}");
let fits = DeviceMemory::cuda(24 << 30).needed(&estimate) <= 24 << 30;

        drop((model, fits));
    }

    fn step<O: Optimizer<Model<Rank>, Rank>>(model: Model<Rank>, update: &mut O) -> Model<Rank> {
        update.step(1e-4, model, GradientsParams::new())
    }

    type Rank = Sharded<Autodiff<Meta>>;

    fn rank(model: Model<Rank>, device: MetaDevice) -> Done {
type B = Rank;

let group = Arc::new(SimulatedRank::new(0, 1024)?);
let mut update = Update::new(AdamWConfig::new().init()).reduce(ZeroSettings::stage(Stage::Gradients), group.clone())?;
let model = update.prepare(model)?;
let sent = || group.traffic().total().data_bytes;
let (estimate, model) = estimate_rank::<B, _>(device, sent, model, |model| step(model, &mut update));

        Ok(())
    }
}

mod zero {
    use super::*;

    fn one_device(config: Config, device: Device<Cuda>) -> Done {
type B = Sharded<Autodiff<Remat<Cuda>>>; // gradients leave during backward, parameters come at each use

let mut model = offload_parameters::<B, _>(config.init(&device))?; // before anything uses it: then one parameter at a time is initialised
let mut optimizer = OffloadConfig::new(HostAdamWConfig::default()).init()?;
optimizer.prepare(&model);

        Ok(())
    }

    fn stage_3<G: ProcessGroup + 'static>(model: Model<Sharded<Autodiff<Remat<Cuda>>>>, group: Arc<G>) -> Done {
type B = Sharded<Autodiff<Remat<Cuda>>>;

let mut update = Update::new(AdamWConfig::new().init()).reduce(ZeroSettings::stage(Stage::Parameters), group)?;
let mut model: Model<B> = update.prepare(model)?;

        optimizes::<B>(&update);
        Ok(())
    }

    type B = Sharded<Base>;

    fn over_ranks(model: Model<B>, group: Arc<dyn ProcessGroup>) -> Done {
let mut update = Update::new(AdamWConfig::new().init()).clip_norm(1.0)?.reduce(ZeroSettings::stage(Stage::Gradients), group)?;
let mut model = update.prepare(model)?; // before the first forward pass: rank 0's weights on all ranks

        drop(model);
        Ok(())
    }

    fn every_part(model: Model<B>, batches: Vec<Batch<B>>, group: Arc<dyn ProcessGroup>) -> Done {
let mut update = Update::new(AdamWConfig::new().init())       // burn-update
    .clip_norm(1.0)?                                          // burn-accum
    .reduce(ZeroSettings::stage(Stage::Gradients), group)?    // burn-zero
    .accumulate(AccumConfig::mean(4))?                        // burn-accum
    .scale(GradScalerConfig::default())?                      // burn-amp
    .average(AverageConfig::new(0.999))?;                     // burn-update
let mut model = update.prepare(model)?; // all ranks start with rank 0's weights
for batch in batches {
    let gradients = update.backward(&model, model.loss(batch));
    model = update.step(1e-3, model, gradients)?;
}

        Ok(())
    }

    fn threads(model: Model<B>, train: Loader<B>, valid: Loader<Inner<B>>) -> Done {
        let scheduler = 1e-3;

let update = Update::new(AdamWConfig::new().init()).reduce_in_learner(ZeroSettings::stage(Stage::Gradients))?;

SupervisedTraining::new("artifacts", train, valid)
    .with_training_strategy(update.strategy().threads(4).into())
    .launch(Learner::new(model, update, scheduler));

        Ok(())
    }

    fn devices<G: ProcessGroup + 'static>(config: Config, train: Loader<B>, valid: Loader<Inner<B>>, group: Arc<G>) {
        let training = SupervisedTraining::new("artifacts", train, valid);
        let (update, scheduler) = (Update::new(AdamWConfig::new().init()), 1e-3);

let device = CudaDevice::new(local_rank().unwrap_or(0));
let strategy = update.strategy().process(group.clone()).with_devices(vec![device.clone()]);
training.with_training_strategy(strategy.into()).launch(Learner::new(config.init(&device), update, scheduler));
    }

    fn sampled<I, D, T>(update: Update<Model<B>, B>, model: Model<B>, batcher: T, dataset: D, valid: Loader<Inner<B>>)
    where
        I: Clone + std::fmt::Debug + Send + Sync + 'static,
        D: Dataset<I> + 'static,
        T: Batcher<B, I, Batch<B>> + Clone + 'static,
    {
// Was: DataLoaderBuilder::new(batcher).batch_size(8).shuffle(42).num_workers(2).build(dataset)
let train = SampledLoader::new(DistributedSampler::shuffled(42), dataset, move |items| {
    DataLoaderBuilder::new(batcher.clone()).batch_size(8).num_workers(2).build(items)
});
let strategy = update.strategy().threads(4).with_train_loader(train.clone());
let training = SupervisedTraining::new("artifacts", train, valid).with_training_strategy(strategy.into());

        training.launch(Learner::new(model, update, 1e-3));
    }

    fn whole_stack(model: Model<B>, train: Loader<B>, valid: Loader<Inner<B>>) -> Done {
        let cosine = 1e-3;
        let training = SupervisedTraining::new("artifacts", train, valid);

let update = Update::new(AdamConfig::new().init()) // not `.init::<B, Model<B>>()`: it runs on shards of the model
    .clip_norm(1.0)? // by the norm over all ranks
    .reduce_in_learner(ZeroSettings::stage(Stage::Gradients))?
    .accumulate(AccumConfig::mean(4))?
    .scale(GradScalerConfig::default())?;
let schedule = update.per_update(cosine);

training
    .with_training_strategy(update.strategy().threads(2).into()) // the one line
    .launch(Learner::new(model, update, schedule));

        Ok(())
    }
}

mod with_a_model_you_cannot_edit {
    use super::*;

    type B = Autodiff<Remat<Cuda>>;

    fn budget() -> Done {
type B = Autodiff<Remat<Cuda>>;

let _budget = MemoryBudget::fraction(0.4)?.install(); // of what the first step takes

        Ok(())
    }

    fn scopes_of_blocks(model: Linear<FusedBackward<Autodiff<Remat<Cuda>>>>) -> Done {
type B = FusedBackward<Autodiff<Remat<Cuda>>>;

let (model, units) = checkpoint_units(model)?; // an error says why if it cannot
let optimizer = units.wrap(AdamWConfig::new().init());

        optimizes::<B>(&optimizer);
        Ok(())
    }

    /// A struct of another crate.
    struct Encoded {
        class: Tensor<B, 2>,
        patches: Tensor<B, 3>,
    }

    struct Encoder;

    impl Encoder {
        fn forward(&self, images: Tensor<B, 4>) -> Encoded {
            unreachable!("not run")
        }
    }

    fn listed(encoder: Encoder, images: Tensor<B, 4>) -> Result<Encoded, Box<dyn Error>> {
let output = checkpoint_listing(
    Policy::Recompute,
    || encoder.forward(images),
    |output, tensors| {
        tensors.add(&output.class).add(&output.patches);
    },
);

        Ok(output)
    }

    struct Agent;

    impl Agent {
        fn sample(&self, observation: Tensor<Autocast<Base>, 2>) -> Vec<f32> {
            unreachable!("not run")
        }
    }

    fn reads(policy: Agent, observation: Tensor<Autocast<Base>, 2>) -> Result<Vec<f32>, Box<dyn Error>> {
let action = autocast::<F32, _>(|| policy.sample(observation.clone()));

        Ok(action)
    }

    type Ranked = Sharded<Autodiff<Remat<Cuda>>>;

    fn units(group: Arc<dyn ProcessGroup>) -> Done {
let reduction = RankReduction::new(ZeroSettings::stage(Stage::Parameters), group)?
    .with_units(|path| path.split('.').take(3).collect::<Vec<_>>().join(".")); // backbone.blocks.0 is one unit, head another
let update = Update::new(AdamWConfig::new().init()).reduce_by(&reduction)?;

        trains::<Ranked>(&update);
        Ok(())
    }

    fn trains<B: AutodiffBackend>(_: &impl Optimizer<Model<B>, B>) {}

    /// The training loop of another crate.
    struct Trainer<M, O> {
        policy: M,
        optimizer: O,
    }

    impl<O: Optimizer<Model<Half>, Half>> Trainer<Model<Half>, O> {
        fn new(policy: Model<Half>, optimizer: O) -> Self {
            Self { policy, optimizer }
        }
    }

    type Half = Autocast<Sharded<Base>, F16>;

    fn its_own_loop(policy: Model<Half>, group: Arc<dyn ProcessGroup>) -> Done {
let mut update = Update::new(AdamWConfig::new().init())
    .reduce(ZeroSettings::stage(Stage::Gradients), group)?
    .scale(GradScalerConfig::default())?;
let policy = update.prepare(policy)?; // before the loop has it
let trainer = Trainer::new(policy, update);

        drop(trainer);
        Ok(())
    }

fn train<B: AutodiffBackend, M: AutodiffModule<B>>(mut model: M, mut optimizer: impl Optimizer<M, B>, loss: impl Fn(&M) -> Tensor<B, 1>) -> M {
    for _ in 0..100 {
        let grads = GradientsParams::from_grads(loss(&model).backward(), &model);
        model = optimizer.step(1e-4, model, grads);
    }
    model
}

    fn clipping(group: Arc<dyn ProcessGroup>) -> Done {
let update = Update::new(AdamWConfig::new().init()).clip_norm(1.0)?.reduce(ZeroSettings::stage(Stage::Gradients), group)?;

        trains::<Sharded<Base>>(&update);
        Ok(())
    }
}

fn of_a_deepspeed_file(model: Model<Autocast<Sharded<Autodiff<LibTorch>>, Configured>>, text: String, group: Arc<dyn ProcessGroup>) -> Done {
let config = DeepSpeedConfig::from_json(&text)?;
config.precision.amp().install()?;                            // with a backend `Autocast<Sharded<..>, Configured>`
let mut update = Update::from_deepspeed(&config, group)?;     // in the Learner: `from_deepspeed_in_learner(&config, ranks)?`
let model = update.prepare(model)?;
Ok(())
}
