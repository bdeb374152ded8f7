//! An average of the weights.

use std::collections::{BTreeMap, HashMap};

use burn::config::Config;
use burn::module::{AutodiffModule, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Device, Shape, Tensor, TensorMetadata, TensorPrimitive, read_sync};
use burn_decorator::module::{for_each_float, map_floats};
use burn_decorator::non_finite::{on, widen};
use burn_decorator::types::FloatTensorOps;

use crate::{Part, PartState, Stateful, Step, UpdateError};

/// The exponential moving average of the weights, for [`Update::average`](crate::Update::average).
///
/// ```text
/// decay = min(decay, (1 + updates) / (10 + updates))      # with warm-up
/// average += (1 - decay) * (weight - average)             # after each update, in f32
/// ```
///
/// It starts at the weights before the first update. Steps that are skipped, and micro-batches that
/// wait in a window, do not move it. It costs one f32 copy of the trained weights.
///
/// ```
/// use burn::{backend::Autodiff, nn::{Linear, LinearConfig}, optim::SgdConfig, tensor::Tensor};
/// use burn_update::{AverageConfig, Update};
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let model = LinearConfig::new(4, 2).init::<B>(&device);
/// let mut update = Update::new(SgdConfig::new().init()).average(AverageConfig::new(0.999))?;
///
/// let loss = model.forward(Tensor::<B, 2>::ones([8, 4], &device)).sum();
/// let gradients = update.backward(&model, loss);
/// let model = update.step(0.1, model, gradients)?;
///
/// let averaged: Linear<burn_flex::Flex> = update.averaged(&model)?; // validate with it
/// # let _ = averaged;
/// # Ok::<(), burn_update::UpdateError>(())
/// ```
#[derive(Config, Debug)]
pub struct AverageConfig {
    /// How much of the average stays at each update: 0 or more, and below 1.
    pub decay: f64,
    /// Whether the decay is smaller at the beginning, so that the average forgets the weights that
    /// the training started from.
    #[config(default = true)]
    pub warm_up: bool,
}

/// The averages of a model's trained parameters.
#[derive(Clone)]
pub(crate) struct Average<I: Backend> {
    config: AverageConfig,
    updates: u64,
    /// By path, f32. A tied parameter has that of its first path.
    weights: BTreeMap<String, I::FloatTensorPrimitive>,
}

impl<I: Backend> Average<I> {
    /// # Errors
    ///
    /// [`UpdateError::InvalidValue`].
    pub(crate) fn new(config: AverageConfig) -> Result<Self, UpdateError> {
        if !(0.0..1.0).contains(&config.decay) {
            return Err(UpdateError::InvalidValue {
                name: "decay",
                value: config.decay,
                expected: "0 or more, and below 1",
            });
        }
        Ok(Self {
            config,
            updates: 0,
            weights: BTreeMap::new(),
        })
    }

    /// How much of the average stays at the next update.
    fn decay(&self) -> f64 {
        let updates = self.updates as f64 + 1.0;
        if self.config.warm_up {
            self.config.decay.min((1.0 + updates) / (10.0 + updates))
        } else {
            self.config.decay
        }
    }

    /// The model with the averages for its weights.
    ///
    /// # Errors
    ///
    /// [`UpdateError::NoAverage`], [`UpdateError::NotAveraged`].
    pub(crate) fn apply<B, M>(&self, model: &M) -> Result<M::InnerModule, UpdateError>
    where
        B: AutodiffBackend<InnerBackend = I>,
        M: AutodiffModule<B>,
    {
        if self.weights.is_empty() {
            return Err(UpdateError::NoAverage { has_part: true });
        }
        let mut averages = HashMap::new();
        for trained in trained::<B, M>(model) {
            averages.insert(trained.id, self.of(&trained)?);
        }
        // `valid` makes running statistics of its own, so the model's stay as they are.
        Ok(map_floats::<I, _>(model.valid(), |_, id, tensor| {
            let Some(average) = averages.get(&id) else {
                return tensor;
            };
            let moved = on(flat::<I>(average.clone()), &I::float_device(&tensor));
            shaped::<I>(moved.cast(tensor.dtype()), tensor.shape())
        }))
    }

    /// The average of a parameter.
    ///
    /// # Errors
    ///
    /// [`UpdateError::NotAveraged`].
    fn of(&self, trained: &Trained<I>) -> Result<I::FloatTensorPrimitive, UpdateError> {
        let shape = trained.value.shape();
        let found = self.weights.get(&trained.path);
        let fitting = found.filter(|average| average.shape() == shape);
        fitting.cloned().ok_or_else(|| UpdateError::NotAveraged {
            parameter: trained.path.clone(),
            shape: shape.to_vec(),
        })
    }
}

/// Where the averages stand in the state.
const WEIGHT: &str = "weight ";

impl<B: AutodiffBackend> Stateful<B> for Average<B::InnerBackend> {
    fn name(&self) -> String {
        "average".to_owned()
    }

    fn save(&self) -> Option<PartState> {
        let mut state = PartState::default();
        state.put_integer("updates", self.updates);
        for (path, average) in &self.weights {
            let read = read_sync(B::InnerBackend::float_into_data(average.clone()));
            let data = read.expect("the averages can be read from their device");
            state.put_tensor(format!("{WEIGHT}{path}"), data);
        }
        Some(state)
    }

    fn load(&mut self, mut state: PartState, device: &Device<B>) -> Result<(), UpdateError> {
        self.updates = state.take_integer("updates")?;
        let saved = state.take_tensors(WEIGHT).into_iter();
        let averages = saved.map(|(path, data)| {
            let average = B::InnerBackend::float_from_data(data, device);
            (path, average)
        });
        self.weights = averages.collect();
        Ok(())
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> Part<M, B> for Average<B::InnerBackend> {
    /// Starts at the weights before the first update.
    fn gradients(
        &mut self,
        _: &mut Step<B::InnerBackend>,
        model: &M,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, UpdateError> {
        if self.weights.is_empty() {
            for trained in trained::<B, M>(model) {
                let value = widened::<B::InnerBackend>(trained.value);
                self.weights.insert(trained.path, value);
            }
        }
        Ok(gradients)
    }

    fn updated(&mut self, _: &Step<B::InnerBackend>, model: &M) -> Result<(), UpdateError> {
        let share = 1.0 - self.decay();
        for trained in trained::<B, M>(model) {
            let before = flat::<B::InnerBackend>(self.of(&trained)?);
            let shape = trained.value.shape();
            let value = flat::<B::InnerBackend>(widened::<B::InnerBackend>(trained.value));
            let average = on(before, &value.device());
            let moved = average.clone() + (value - average) * share;
            self.weights
                .insert(trained.path, shaped::<B::InnerBackend>(moved, shape));
        }
        self.updates += 1;
        Ok(())
    }
}

/// A parameter that is trained.
struct Trained<I: Backend> {
    path: String,
    id: ParamId,
    value: I::FloatTensorPrimitive,
}

/// The trained parameters of a model, each once, in module order.
fn trained<B, M>(model: &M) -> Vec<Trained<B::InnerBackend>>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let mut found: Vec<Trained<B::InnerBackend>> = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for_each_float::<B, M>(model, |path, id, tensor| {
        if B::float_is_require_grad(&tensor) && seen.insert(id) {
            found.push(Trained {
                path: path.to_owned(),
                id,
                value: B::inner(tensor),
            });
        }
    });
    found
}

/// The tensor as a vector of its elements.
fn flat<I: Backend>(tensor: I::FloatTensorPrimitive) -> Tensor<I, 1> {
    let elements = tensor.shape().num_elements();
    let flat = I::float_reshape(tensor, [elements].into());
    Tensor::from_primitive(TensorPrimitive::Float(flat))
}

/// The elements in a shape of as many.
fn shaped<I: Backend>(elements: Tensor<I, 1>, shape: Shape) -> I::FloatTensorPrimitive {
    I::float_reshape(elements.into_primitive().tensor(), shape)
}

/// The tensor in at least f32.
fn widened<I: Backend>(tensor: I::FloatTensorPrimitive) -> I::FloatTensorPrimitive {
    let tensor = Tensor::<I, 1>::from_primitive(TensorPrimitive::Float(tensor));
    widen(tensor).into_primitive().tensor()
}
