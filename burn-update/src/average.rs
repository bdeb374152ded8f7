//! An average of the weights.

use std::collections::{BTreeMap, HashMap, HashSet};

use burn::config::Config;
use burn::module::{AutodiffModule, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::ops::FloatTensor;
use burn::tensor::{Device, Shape, Tensor, TensorMetadata, TensorPrimitive, read_sync};
use burn_decorator::module::{for_each_float, map_floats};
use burn_decorator::non_finite::{on, widen};
use burn_decorator::types::FloatTensorOps;

use crate::{LastParts, Parameter, Part, PartState, Stateful, Step, UpdateError, UpdateRecord};

/// The exponential moving average of the weights, for [`Update::average`](crate::Update::average).
///
/// ```text
/// decay = min(decay, (1 + updates) / (10 + updates))      # with warm-up
/// average += (1 - decay) * (weight - average)             # after each update, in f32
/// ```
///
/// It starts at the weights before the first update. Steps that are skipped, and micro-batches that
/// wait in a window, do not move it. It costs one f32 copy of the trained weights; in an update over
/// ranks that shards the optimizer's state, of this rank's shard of them.
///
/// The training loop of a Learner ([`Update::strategy`](crate::Update::strategy)) validates with it
/// from the first update on: metrics, early stopping and the choice of records are of the averages.
/// The model that it returns has the trained weights. The averages are in the record of the update:
/// load it into an update with the part, and call `averaged`.
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
    /// In a reduction over ranks, where the weights are this rank's shards: the path of the
    /// parameter of each, by the shard's id.
    shards: Option<HashMap<ParamId, String>>,
    /// On rank 0, while a Learner has a record written: the averages of all ranks.
    whole: Option<PartState>,
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
            shards: None,
            whole: None,
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
        self.check_begun()?;
        let mut averages = HashMap::new();
        let mut replaced = self.trained::<B, M>(model);
        if replaced.is_empty() {
            // A trained model that came back from `valid`, or from a Learner.
            replaced = parameters::<B, M>(model, |path, _| self.weights.contains_key(path));
        }
        for parameter in replaced {
            averages.insert(parameter.id, self.of(&parameter)?);
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

    /// # Errors
    ///
    /// [`UpdateError::NoAverage`] before the first update.
    fn check_begun(&self) -> Result<(), UpdateError> {
        match self.updates {
            0 => Err(UpdateError::NoAverage { has_part: true }),
            _ => Ok(()),
        }
    }

    /// The trained parameters of a module, each once, in module order.
    fn trained<B, M>(&self, module: &M) -> Vec<Trained<I>>
    where
        B: AutodiffBackend<InnerBackend = I>,
        M: AutodiffModule<B>,
    {
        match &self.shards {
            None => parameters::<B, M>(module, |_, tensor| B::float_is_require_grad(tensor)),
            Some(shards) => {
                let mut found = parameters::<B, M>(module, |_, _| true);
                found.retain_mut(|shard| match shards.get(&shard.id) {
                    Some(path) => {
                        shard.path.clone_from(path);
                        true
                    }
                    None => false,
                });
                found
            }
        }
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

/// The part's name.
pub(crate) const AVERAGE: &str = "average";

/// Where the averages stand in the state.
const WEIGHT: &str = "weight ";

impl<B: AutodiffBackend> Stateful<B> for Average<B::InnerBackend> {
    fn name(&self) -> String {
        AVERAGE.to_owned()
    }

    /// That of all ranks while a Learner has a record written.
    fn save(&self) -> Option<PartState> {
        if self.whole.is_some() {
            return self.whole.clone();
        }
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
            for trained in self.trained::<B, M>(model) {
                let value = widened::<B::InnerBackend>(trained.value);
                self.weights.insert(trained.path, value);
            }
        }
        Ok(gradients)
    }

    fn updated(&mut self, _: &Step<B::InnerBackend>, model: &M) -> Result<(), UpdateError> {
        let share = 1.0 - self.decay();
        for trained in self.trained::<B, M>(model) {
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

/// The average in a reduction over ranks, of this rank's shards.
impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> LastParts<M, B> {
    /// Keeps an average from now on, of the shards that these parts update.
    ///
    /// # Errors
    ///
    /// [`UpdateError::InvalidValue`].
    pub fn keep_average(&mut self, config: AverageConfig) -> Result<(), UpdateError> {
        *self.as_optimizer_mut().average_mut() = Some(Average::new(config)?);
        Ok(())
    }

    /// Tells the average which parameters the shards are of.
    pub(crate) fn name_averages(&mut self, parameters: &[Parameter]) {
        if let Some(average) = self.as_optimizer_mut().average_mut() {
            let mut paths = HashMap::new();
            for parameter in parameters {
                // A tied parameter is listed at each of its paths.
                let path = paths.entry(parameter.id);
                path.or_insert_with(|| parameter.path.clone());
            }
            average.shards = Some(paths);
        }
    }

    /// The average, which has its own place in the record.
    pub fn average(&self) -> Option<&dyn Stateful<B>> {
        let average = self.as_optimizer().kept_average()?;
        Some(average)
    }

    /// [`average`](Self::average), to load it.
    pub fn average_mut(&mut self) -> Option<&mut dyn Stateful<B>> {
        let average = self.as_optimizer_mut().average_mut().as_mut()?;
        Some(average)
    }

    /// The averages of the shards, in f32, by the paths of their parameters.
    ///
    /// # Errors
    ///
    /// [`UpdateError::NoAverage`].
    pub fn averages(&self) -> Result<Averages<B::InnerBackend>, UpdateError> {
        let average = self.as_optimizer().kept_average();
        let average = average.ok_or(UpdateError::NoAverage { has_part: false })?;
        average.check_begun()?;
        Ok(average.weights.clone())
    }

    /// While a Learner has a record written, the average is saved as `record` has it: that of all
    /// ranks.
    ///
    /// # Errors
    ///
    /// [`UpdateError::RecordLacks`].
    pub fn hold_average_of(&mut self, record: &mut UpdateRecord<B>) -> Result<(), UpdateError> {
        if let Some(average) = self.as_optimizer_mut().average_mut() {
            average.whole = record.take(&Stateful::<B>::name(average))?;
        }
        Ok(())
    }

    /// The record is written.
    pub fn release_average(&mut self) {
        if let Some(average) = self.as_optimizer_mut().average_mut() {
            average.whole = None;
        }
    }
}

/// Averages by the paths of their parameters.
pub type Averages<I> = BTreeMap<String, FloatTensor<I>>;

/// A parameter that is trained.
struct Trained<I: Backend> {
    path: String,
    id: ParamId,
    value: I::FloatTensorPrimitive,
}

/// The parameters of a module that are `wanted`, each once, in module order.
fn parameters<B, M>(
    module: &M,
    wanted: impl Fn(&str, &FloatTensor<B>) -> bool,
) -> Vec<Trained<B::InnerBackend>>
where
    B: AutodiffBackend,
    M: AutodiffModule<B>,
{
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    for_each_float::<B, M>(module, |path, id, tensor| {
        if wanted(path, &tensor) && seen.insert(id) {
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
