//! On stock Burn 0.22.1: `HostAdamW` as an `Optimizer`, and accumulation in a strategy of the
//! Learner.

#[allow(
    dead_code,
    unused_imports,
    missing_docs,
    reason = "the shared sources have more than is used here"
)]
mod offload;

use std::sync::{Arc, Mutex};

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{
    AdamWConfig, GradientsAccumulator, GradientsParams, LearningRate, ModuleOptimizer, Optimizer,
    RecordState, SgdConfig, StateSink, StateSource,
};
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearnerEvent, RegressionOutput,
    SupervisedLearningStrategy, SupervisedTraining, SupervisedTrainingEventProcessor, TrainLoader,
    TrainOutput, TrainStep, TrainingComponents, TrainingItem, TrainingStrategy, ValidLoader,
};
use error::ZeroError;
use offload::{AdamWState, Gradients, HostAdamW, HostAdamWConfig};

/// Where burn-zero has its error.
mod error {
    /// The variants that `HostAdamW` makes.
    #[derive(Debug, thiserror::Error)]
    pub(crate) enum ZeroError {
        #[error(transparent)]
        BufferLength(#[from] burn_ranks::BufferLength),
        #[error("{what}: no memory for {bytes} bytes: {reason}")]
        OutOfMemory {
            what: String,
            bytes: usize,
            reason: String,
        },
    }
}

/// AdamW with its state in host memory, as an optimizer of Burn.
#[derive(Clone)]
struct OnHost(HostAdamWConfig);

/// Master and moments of a parameter.
struct HostState<const D: usize>(HostAdamW);

impl<const D: usize> Clone for HostState<D> {
    fn clone(&self) -> Self {
        let copy = HostAdamW::from_state(self.0.config().clone(), self.0.state());
        Self(copy.expect("memory"))
    }
}

impl<const D: usize> RecordState for HostState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        let state = self.0.state();
        for (name, values) in [
            ("master", state.master),
            ("moment_1", state.moment_1),
            ("moment_2", state.moment_2),
        ] {
            let data = TensorData::new(values.to_vec(), [values.len()]);
            out.push_tensor(prefix, name, data);
        }
        out.push_scalar(prefix, "steps", state.steps.into());
    }

    /// With the default configuration: a record does not know its optimizer, whose next step puts
    /// its own in place.
    fn state_unflatten(prefix: &str, src: &mut StateSource, _device: &Device) -> Option<Self> {
        let mut take = |name| {
            let data = src.take_tensor(prefix, name)?;
            data.try_into_vec::<f32>().ok()
        };
        let [master, moment_1, moment_2] = [take("master")?, take("moment_1")?, take("moment_2")?];
        let state = AdamWState {
            steps: src.take_scalar(prefix, "steps")?.try_into().ok()?,
            master: &master,
            moment_1: &moment_1,
            moment_2: &moment_2,
        };
        let adamw = HostAdamW::from_state(HostAdamWConfig::default(), state);
        adamw.ok().map(Self)
    }
}

impl Optimizer for OnHost {
    type State<const D: usize> = HostState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<HostState<D>>,
    ) -> (Tensor<D>, Option<HostState<D>>) {
        let (shape, device) = (tensor.shape(), tensor.device());
        let mut adamw = match state {
            None => HostAdamW::new(self.0.clone(), &floats(tensor)).expect("memory"),
            Some(HostState(adamw)) if *adamw.config() == self.0 => adamw,
            Some(HostState(adamw)) => {
                HostAdamW::from_state(self.0.clone(), adamw.state()).expect("memory")
            }
        };
        let grad = floats(grad);
        let stepped = adamw.step(lr, Gradients::F32(&grad), None);
        stepped.expect("a gradient of the parameter's size");
        let new = TensorData::new(adamw.master().to_vec(), shape);
        (Tensor::from_data(new, &device), Some(HostState(adamw)))
    }

    fn to_device<const D: usize>(state: HostState<D>, _device: &Device) -> HostState<D> {
        state
    }
}

fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    let data = tensor.into_data();
    data.try_into_vec::<f32>().expect("f32")
}

#[derive(Module, Debug)]
struct Model {
    up: Linear,
    norm: LayerNorm,
    down: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        device.seed(7);
        Self {
            up: LinearConfig::new(4, 16).init(device),
            norm: LayerNormConfig::new(16).init(device),
            down: LinearConfig::new(16, 2).init(device),
        }
    }

    fn forward(&self, batch: Batch) -> RegressionOutput {
        let hidden = Gelu::new().forward(self.norm.forward(self.up.forward(batch.x)));
        let output = self.down.forward(hidden);
        let loss = MseLoss::new().forward(output.clone(), batch.y.clone(), Reduction::Mean);
        RegressionOutput::new(loss, output, batch.y)
    }
}

/// Inputs and targets.
#[derive(Clone, Debug)]
struct Batch {
    x: Tensor<2>,
    y: Tensor<2>,
}

impl TrainStep for Model {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Model {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> RegressionOutput {
        self.forward(batch)
    }
}

fn device() -> Device {
    Device::flex().autodiff()
}

type Values = Vec<Vec<f32>>;

/// The parameters, or the gradients of them, in order of visit.
fn values(model: &Model, grads: Option<&GradientsParams>) -> Values {
    struct Collect<'a>(Option<&'a GradientsParams>, Values);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.push(match self.0 {
                None => floats(param.val()),
                Some(grads) => floats(grads.get::<D>(param.id).expect("a gradient")),
            });
        }
    }
    let mut visitor = Collect(grads, Vec::new());
    model.visit(&mut visitor);
    visitor.1
}

/// The greatest difference of two elements.
fn difference(left: &Values, right: &Values) -> f32 {
    assert_eq!(left.len(), right.len());
    let pairs = left.iter().zip(right).flat_map(|(left, right)| {
        assert_eq!(left.len(), right.len());
        left.iter().zip(right)
    });
    pairs
        .map(|(left, right)| (left - right).abs())
        .fold(0.0, f32::max)
}

/// Items of the data set: four inputs and two targets each.
fn items() -> Vec<[f32; 6]> {
    let device = Device::flex();
    device.seed(11);
    let all = Tensor::<2>::random([10, 6], Distribution::Default, &device);
    floats(all)
        .chunks_exact(6)
        .map(|item| item.try_into().expect("six"))
        .collect()
}

fn batch(items: &[[f32; 6]], device: &Device) -> Batch {
    let all = TensorData::new(items.concat(), [items.len(), 6]);
    let all = Tensor::<2>::from_data(all, device);
    Batch {
        x: all.clone().narrow(1, 0, 4),
        y: all.narrow(1, 4, 2),
    }
}

/// Bit for bit what HostAdamW makes of each parameter by itself; as near to Burn's AdamW as f32
/// factors of it allow; and continued from a record bit for bit.
#[test]
fn host_adamw_is_an_optimizer_of_burn() {
    let device = device();
    let config = HostAdamWConfig::default();
    let batch = batch(&items(), &device);
    let lr = 1e-2;
    let start = Model::new(&device);
    let initial = values(&start, None);
    let by_itself = initial
        .iter()
        .map(|values| HostAdamW::new(config.clone(), values));
    let mut by_itself: Vec<HostAdamW> = by_itself.map(|adamw| adamw.expect("memory")).collect();
    let mut optimizer = ModuleOptimizer::from(OnHost(config.clone()));
    let burns = AdamWConfig::new()
        .with_epsilon(1e-8)
        .with_weight_decay(0.01);
    let mut burns = (start.clone(), burns.init());
    let mut model = start;
    for step in 0..6 {
        if step == 3 {
            let bytes = optimizer.into_bytes().expect("a record");
            let new = ModuleOptimizer::from(OnHost(config.clone()));
            optimizer = new.from_bytes(bytes).expect("the record is read");
        }
        let grads = TrainStep::step(&model, batch.clone()).grads;
        for (adamw, grad) in by_itself.iter_mut().zip(values(&model, Some(&grads))) {
            let stepped = adamw.step(lr, Gradients::F32(&grad), None);
            stepped.expect("sizes agree");
        }
        model = optimizer.step(lr, model, grads);
        let expected: Values = by_itself
            .iter()
            .map(|adamw| adamw.master().to_vec())
            .collect();
        assert!(values(&model, None) == expected, "step {step}: bit for bit");
        let grads = TrainStep::step(&burns.0, batch.clone()).grads;
        burns.0 = burns.1.step(lr, burns.0, grads);
    }
    let found = values(&model, None);
    assert!(difference(&found, &initial) > 3e-2);
    let apart = difference(&found, &values(&burns.0, None));
    assert!(apart < 2e-5, "{apart} from Burn's AdamW");
}

/// Steps with the mean gradient over the items of a window of batches, the last window shorter.
struct Accumulating {
    window: usize,
    /// The gradients that the optimizer was given.
    given: Arc<Mutex<Vec<Values>>>,
}

/// Multiplies gradients.
struct Times<'a>(&'a mut GradientsParams, f32);

impl ModuleVisitor for Times<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.0.remove::<D>(param.id) {
            self.0.register(param.id, grad * self.1);
        }
    }
}

impl SupervisedLearningStrategy<Model> for Accumulating {
    fn fit(
        &self,
        components: TrainingComponents<Model>,
        mut learner: Learner<Model>,
        train: TrainLoader<Model>,
        _valid: ValidLoader<Model>,
        starting_epoch: usize,
    ) -> (Model, SupervisedTrainingEventProcessor<Model>) {
        let mut events = components.event_processor;
        let mut tell = |event| events.process_train(event).expect("the event is processed");
        for epoch_number in starting_epoch..=components.num_epochs {
            let total_items = train.num_items();
            tell(LearnerEvent::StartSplit {
                epoch_number,
                total_items,
            });
            let mut batches = train.iter();
            let mut sum = GradientsAccumulator::new();
            let (mut summed, mut items, mut seen) = (0, 0, 0);
            let mut iteration = 0;
            while let Some(batch) = batches.next() {
                let progress = batches.progress();
                let size = progress.items_processed - seen;
                seen = progress.items_processed;
                let mut output = learner.train_step(batch.expect("a batch"));
                let model = learner.model();
                model.visit(&mut Times(&mut output.grads, size as f32));
                sum.accumulate(&model, output.grads);
                (summed, items, iteration) = (summed + 1, items + size, iteration + 1);
                if summed == self.window || progress.is_completed() {
                    let mut mean = sum.grads();
                    model.visit(&mut Times(&mut mean, 1.0 / items as f32));
                    let given = values(&model, Some(&mean));
                    self.given.lock().expect("no panic").push(given);
                    learner.lr_step();
                    learner.optimizer_step(mean);
                    (summed, items) = (0, 0);
                }
                let lr = Some(learner.lr_current());
                let item = TrainingItem::new(output.item, progress, Some(iteration), lr);
                tell(LearnerEvent::ProcessedItem(item));
            }
            tell(LearnerEvent::EndSplit(epoch_number));
            tell(LearnerEvent::EndEpoch(epoch_number));
        }
        (learner.model(), events)
    }
}

struct Stack;

impl Batcher<[f32; 6], Batch> for Stack {
    fn batch(&self, items: Vec<[f32; 6]>, device: &Device) -> Batch {
        batch(&items, device)
    }
}

fn loader(device: Device) -> Arc<dyn DataLoader<Batch>> {
    let loader = DataLoaderBuilder::new(Stack)
        .batch_size(3)
        .set_device(device);
    loader.build(InMemDataset::new(items()))
}

/// Batches of 3, 3, 3 and 1 items in windows of two are a batch of 6 and one of 4: the same
/// gradients and parameters, to rounding.
#[test]
fn a_strategy_of_the_learner_accumulates() {
    const LR: f64 = 1e-2;
    let device = device();
    let optimizers: [fn() -> ModuleOptimizer; 2] = [
        || SgdConfig::new().init(),
        || OnHost(HostAdamWConfig::default()).into(),
    ];
    for optimizer in optimizers {
        let start = Model::new(&device);
        let initial = values(&start, None);
        let given = Arc::default();
        let strategy = Accumulating {
            window: 2,
            given: Arc::clone(&given),
        };
        let loaders = [loader(device.clone()), loader(Device::flex())];
        let [train, valid] = loaders;
        let training = SupervisedTraining::new(env!("CARGO_TARGET_TMPDIR"), train, valid)
            .with_training_strategy(TrainingStrategy::Custom(Arc::new(strategy)))
            .with_application_logger(None)
            .num_epochs(3);
        let learned = training.launch(Learner::new(start.clone(), optimizer(), LR));
        assert!(learned.error.is_none());

        let (mut model, mut optimizer) = (start, optimizer());
        let items = items();
        let mut expected = Vec::new();
        for _ in 0..3 {
            for window in [&items[..6], &items[6..]] {
                let grads = TrainStep::step(&model, batch(window, &device)).grads;
                expected.push(values(&model, Some(&grads)));
                model = optimizer.step(LR, model, grads);
            }
        }
        let given: Vec<Values> = std::mem::take(&mut given.lock().expect("no panic"));
        assert_eq!(given.len(), expected.len());
        for (given, expected) in given.iter().zip(&expected) {
            let apart = difference(given, expected);
            assert!(apart < 1e-6, "gradients are {apart} apart");
        }
        let found = values(&learned.model, None);
        assert!(difference(&found, &initial) > 1e-3);
        let apart = difference(&found, &values(&model, None));
        assert!(apart < 1e-5, "parameters are {apart} apart");
    }
}
