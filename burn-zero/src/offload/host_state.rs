//! The state of a parameter, and the record, which is that of Burn's AdamW plus the masters of
//! low-precision parameters.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::ParamId;
use burn::record::{PrecisionSettings, Record};
use burn::tensor::{DType, TensorData, backend::Backend};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

use super::host_adamw::copy;
use super::{AdamWState, Gradients, HostAdamW, HostAdamWConfig, ParamsOut};
use crate::error::ZeroError;
use crate::host::{floats, widened};

/// State of a parameter. Clones share it until one of them steps.
#[derive(Clone)]
pub(super) enum State {
    Host(Arc<HostState>),
    /// From a record, until the parameter's first step.
    Saved(Arc<StateItem>),
}

impl State {
    /// Elements of a state that has taken a step.
    pub(super) fn elements(&self) -> usize {
        match self {
            Self::Host(state) => state.adamw.len(),
            Self::Saved(_) => 0,
        }
    }

    /// Whether it has the numbers of a parameter: not if it was made in a program without data.
    pub(super) fn has_values(&self) -> bool {
        match self {
            Self::Host(state) => state.has_values(),
            Self::Saved(_) => true,
        }
    }

    /// The shapes of its tensors, which must equal the parameter's.
    pub(super) fn shapes(&self) -> Vec<Vec<usize>> {
        match self {
            Self::Host(state) => vec![state.shape.clone()],
            Self::Saved(saved) => {
                let momentum = &saved.momentum;
                let moments = [&momentum.moment_1, &momentum.moment_2].into_iter();
                let all = moments.chain(&saved.master);
                all.map(|data| data.shape.to_vec()).collect()
            }
        }
    }

    /// The state for a record.
    fn save(self) -> Arc<StateItem> {
        let (time, [moment_1, moment_2], master) = match self {
            Self::Saved(saved) => return saved,
            Self::Host(state) => {
                let data = |values: &[f32]| state.data(values);
                let (moment_1, moment_2) = state.adamw.moments();
                let master = (state.dtype != DType::F32).then(|| data(state.adamw.master()));
                let time = state.adamw.steps() as usize;
                (time, [data(moment_1), data(moment_2)], master)
            }
        };
        let momentum = MomentumItem {
            time,
            moment_1,
            moment_2,
            max_moment_2: None,
        };
        Arc::new(StateItem { momentum, master })
    }
}

/// A parameter whose state is on the host.
#[derive(Debug)]
pub(super) struct HostState {
    adamw: HostAdamW,
    shape: Vec<usize>,
    /// Type of the parameter; the master is f32.
    dtype: DType,
}

impl HostState {
    /// The state that a step starts from, with a single owner. `value` is required if there is no
    /// state on the host, and becomes the master if the master does not round to it.
    ///
    /// # Errors
    ///
    /// Those of [`HostAdamW`].
    pub(super) fn new(
        state: Option<State>,
        value: Option<TensorData>,
        config: &HostAdamWConfig,
        path: &str,
    ) -> Result<Self, ZeroError> {
        let (mut own, value) = match (state, value) {
            (Some(State::Host(state)), value) => {
                let mut own = if state.adamw.config() == config {
                    // Copied if a clone of the optimizer or a record shares it.
                    Arc::try_unwrap(state).or_else(|shared| shared.copy(config))?
                } else {
                    state.copy(config)?
                };
                let Some(value) = value else { return Ok(own) };
                own.dtype = value.dtype; // the model may have been cast
                (own, value)
            }
            (state, value) => {
                let value = value.expect("a parameter's first step comes with its value");
                let adamw = match state.map(State::save) {
                    None => HostAdamW::new(config.clone(), &widened(&value))?,
                    Some(saved) => {
                        let momentum = &saved.momentum;
                        let state = AdamWState {
                            steps: momentum.time as u64,
                            master: &widened(saved.master.as_ref().unwrap_or(&value)),
                            moment_1: &widened(&momentum.moment_1),
                            moment_2: &widened(&momentum.moment_2),
                        };
                        HostAdamW::from_state(config.clone(), state)?
                    }
                };
                let own = Self {
                    adamw,
                    shape: value.shape.to_vec(),
                    dtype: value.dtype,
                };
                (own, value)
            }
        };
        if !own.rounds_to(&value) {
            copy(&floats(value), own.adamw.master_mut());
            log::info!(
                "{path}: the weights were changed since the last step, and the host follows"
            );
        }
        Ok(own)
    }

    /// The state of a parameter like `gradient` in a program without data: of no elements.
    ///
    /// # Errors
    ///
    /// Those of [`HostAdamW`].
    pub(super) fn without_values(
        config: &HostAdamWConfig,
        gradient: &TensorData,
    ) -> Result<Self, ZeroError> {
        Ok(Self {
            adamw: HostAdamW::new(config.clone(), &[])?,
            shape: gradient.shape.to_vec(),
            dtype: gradient.dtype,
        })
    }

    /// Whether it was made with a parameter, and not in a program without data.
    fn has_values(&self) -> bool {
        self.adamw.len() == self.shape.iter().product::<usize>()
    }

    /// Its numbers for a record; zeros in a program without data.
    fn data(&self, values: &[f32]) -> TensorData {
        if self.has_values() {
            TensorData::new(values.to_vec(), self.shape.clone())
        } else {
            TensorData::zeros::<f32, _>(self.shape.clone())
        }
    }

    fn copy(&self, config: &HostAdamWConfig) -> Result<Self, ZeroError> {
        Ok(Self {
            adamw: HostAdamW::from_state(config.clone(), self.adamw.state())?,
            shape: self.shape.clone(),
            dtype: self.dtype,
        })
    }

    /// Whether the master, rounded, is the parameter's value.
    fn rounds_to(&self, value: &TensorData) -> bool {
        let master = TensorData::new(self.adamw.master().to_vec(), self.shape.clone());
        master.convert_dtype(self.dtype).as_bytes() == value.as_bytes()
    }

    /// A step: the new value of the parameter, in its own type.
    ///
    /// # Errors
    ///
    /// Those of [`HostAdamW::step`].
    pub(super) fn update(
        &mut self,
        learning_rate: f64,
        gradient: TensorData,
    ) -> Result<TensorData, ZeroError> {
        let gradient = match gradient.dtype {
            DType::F32 | DType::BF16 | DType::F16 => gradient,
            _ => gradient.convert_dtype(DType::F32),
        };
        let view = match gradient.dtype {
            DType::BF16 => Gradients::Bf16(gradient.as_slice().expect(ALIGNED)),
            DType::F16 => Gradients::F16(gradient.as_slice().expect(ALIGNED)),
            _ => Gradients::F32(gradient.as_slice().expect(ALIGNED)),
        };
        let (elements, shape) = (self.adamw.len(), self.shape.clone());
        match self.dtype {
            DType::BF16 => {
                let mut out = vec![bf16::ZERO; elements];
                self.adamw
                    .step(learning_rate, view, Some(ParamsOut::Bf16(&mut out)))?;
                Ok(TensorData::new(out, shape))
            }
            DType::F16 => {
                let mut out = vec![f16::ZERO; elements];
                self.adamw
                    .step(learning_rate, view, Some(ParamsOut::F16(&mut out)))?;
                Ok(TensorData::new(out, shape))
            }
            _ => {
                self.adamw.step(learning_rate, view, None)?;
                // The gradient's memory is reused for the new parameter.
                let mut out = floats(gradient);
                copy(self.adamw.master(), &mut out);
                Ok(TensorData::new(out, shape))
            }
        }
    }
}

const ALIGNED: &str = "elements of the type that the data says";

/// State of an [`OffloadedAdamW`](super::OffloadedAdamW) in host memory; loading and saving do not
/// use the device.
///
/// Written with named fields (`NamedMpkFileRecorder`, JSON) it is interchangeable with a record of
/// Burn's AdamW: moments and step counts by parameter. A parameter of a lower precision than f32
/// also has its `master`, which Burn ignores; if that is missing, or does not round to the module's
/// weights, the weights become the master.
///
/// Every recorder stores moments and masters in f32, also one of half precision, in whose f16
/// second moments would become 0.
///
/// The record shares the optimizer's state: a step while the record exists copies the states that
/// it changes.
#[derive(Clone)]
pub struct OffloadRecord(pub(super) HashMap<ParamId, State>);

impl OffloadRecord {
    /// The number of parameters.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

impl core::fmt::Debug for OffloadRecord {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("OffloadRecord")
            .field("parameters", &self.len())
            .finish_non_exhaustive()
    }
}

/// For any backend: the record's tensors are on the host.
impl<B: Backend> Record<B> for OffloadRecord {
    type Item<S: PrecisionSettings> = HashMap<String, EntryItem>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        let items = self.0.into_iter().map(|(id, state)| {
            let item = Arc::unwrap_or_clone(state.save());
            let rank = format!("Rank{}", item.momentum.moment_1.rank());
            (id.serialize(), EntryItem::V1(HashMap::from([(rank, item)])))
        });
        items.collect()
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, _device: &B::Device) -> Self {
        let states = item.into_iter().flat_map(|(id, EntryItem::V1(ranked))| {
            let id = ParamId::deserialize(&id);
            let states = ranked.into_values();
            states.map(move |state| {
                let is_amsgrad = state.momentum.max_moment_2.is_some();
                assert!(!is_amsgrad, "{AMSGRAD}");
                if matches!(state.momentum.moment_2.dtype, DType::F16 | DType::BF16) {
                    burn_decorator::warn_user!("{HALF}");
                }
                (id, State::Saved(Arc::new(state)))
            })
        });
        Self(states.collect())
    }
}

const AMSGRAD: &str = "the record is of AMSGrad, whose third moment the host optimizer does not have: go on with Burn's AdamW, \
                       or start without the optimizer's record";

const HALF: &str = "the record's moments are in half precision, as a recorder such as CompactRecorder stores those of Burn's \
                    optimizers: second moments below 3e-8 are 0 in it, and the first steps after \
                    it may be far too large; load a record of full precision, or begin with a small learning rate";

/// A parameter's entry in a file: Burn's `AdaptorRecordItem` of AdamW, name for name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum EntryItem {
    /// The only version: by the dimensions of the parameter, such as `Rank2`.
    V1(HashMap<String, StateItem>),
}

/// State of AdamW: Burn's, and the master.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StateItem {
    pub(super) momentum: MomentumItem,
    /// The f32 master of a low-precision parameter. An f32 parameter is its own master.
    #[serde(default)]
    pub(super) master: Option<TensorData>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct MomentumItem {
    pub(super) time: usize,
    pub(super) moment_1: TensorData,
    pub(super) moment_2: TensorData,
    #[serde(default)]
    max_moment_2: Option<TensorData>,
}
