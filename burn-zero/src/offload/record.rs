//! State of a parameter, and the record: that of Burn's AdamW, and masters of low-precision parameters.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::ParamId;
use burn::record::{PrecisionSettings, Record};
use burn::tensor::{DType, TensorData, TensorMetadata, backend::Backend};
use burn_backend::tensor::FloatTensor;
use serde::{Deserialize, Serialize};

use super::OffloadError;
use super::pipeline::HostState;
use crate::host::HostRead;

/// State of a parameter, wherever it is. Clones share what is in host memory until one of them steps.
#[derive(Clone)]
pub(super) enum State<I: Backend> {
    Host(Arc<HostState>),
    Device(DeviceState<I>),
    /// From a record, until the parameter's first step.
    Saved(Arc<StateItem>),
}

/// State of Burn's AdamW on the device.
#[derive(Clone)]
pub(super) struct DeviceState<I: Backend> {
    pub(super) time: usize,
    pub(super) moment_1: FloatTensor<I>,
    pub(super) moment_2: FloatTensor<I>,
}

impl<I: Backend> State<I> {
    /// The shapes of its tensors, which must equal the parameter's.
    pub(super) fn shapes(&self) -> Vec<Vec<usize>> {
        match self {
            Self::Host(state) => vec![state.shape.clone()],
            Self::Device(state) => vec![state.moment_1.shape().to_vec()],
            Self::Saved(saved) => {
                let momentum = &saved.momentum;
                let moments = [&momentum.moment_1, &momentum.moment_2].into_iter();
                let all = moments.chain(&saved.master);
                all.map(|data| data.shape.to_vec()).collect()
            }
        }
    }

    /// The state for a record. State on the device is copied to the host.
    pub(super) fn save(self) -> Arc<StateItem> {
        let (time, moment_1, moment_2, master) = match self {
            Self::Saved(saved) => return saved,
            Self::Device(state) => {
                let moments = [state.moment_1, state.moment_2].map(HostRead::start::<I>);
                let [moment_1, moment_2] = moments.map(HostRead::data);
                (state.time, moment_1, moment_2, None)
            }
            Self::Host(state) => {
                let data = |values: &[f32]| TensorData::new(values.to_vec(), state.shape.clone());
                let (moment_1, moment_2) = state.adamw.moments();
                let master = (state.dtype != DType::F32).then(|| data(state.adamw.master()));
                let time = state.adamw.steps() as usize;
                (time, data(moment_1), data(moment_2), master)
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

/// State of an [`OffloadedAdamW`](super::OffloadedAdamW) in host memory; loading and saving do not use the device.
///
/// Written with named fields (`NamedMpkFileRecorder`, JSON) it is interchangeable with a record of Burn's AdamW: moments and
/// step counts by parameter. A parameter of a lower precision than f32 also has its `master`, which Burn ignores; if
/// that is missing, or does not round to the module's weights, the weights become the master. The record does not contain the ratio and
/// can be loaded with any.
///
/// It shares the optimizer's state: a step during its lifetime copies what it changes.
#[derive(Clone)]
pub struct OffloadRecord<I: Backend>(pub(super) HashMap<ParamId, State<I>>);

impl<I: Backend> OffloadRecord<I> {
    /// Parameters that it has state of.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none: before the first step.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// # Errors
    ///
    /// [`OffloadError::AmsGrad`] if there is a third moment.
    pub(super) fn check(&self) -> Result<(), OffloadError> {
        let amsgrad = |state: &State<I>| match state {
            State::Saved(saved) => saved.momentum.max_moment_2.is_some(),
            _ => false,
        };
        match self.0.values().any(amsgrad) {
            true => Err(OffloadError::AmsGrad),
            false => Ok(()),
        }
    }
}

impl<I: Backend> core::fmt::Debug for OffloadRecord<I> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("OffloadRecord")
            .field("parameters", &self.len())
            .finish_non_exhaustive()
    }
}

/// Any backend: its tensors are on the host.
impl<I: Backend, B: Backend> Record<B> for OffloadRecord<I> {
    type Item<S: PrecisionSettings> = HashMap<String, EntryItem>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        let items = self.0.into_iter().map(|(id, state)| {
            let item = Arc::unwrap_or_clone(state.save()).convert::<S>();
            (id.serialize(), EntryItem::V1(Ranked::new(item)))
        });
        items.collect()
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, _device: &B::Device) -> Self {
        let states = item.into_iter().map(|(id, EntryItem::V1(ranked))| {
            let state = State::Saved(Arc::new(ranked.into_inner()));
            (ParamId::deserialize(&id), state)
        });
        Self(states.collect())
    }
}

/// A parameter's entry in a file: Burn's `AdaptorRecordItem` of AdamW, name for name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum EntryItem {
    /// The only version.
    V1(Ranked),
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

impl StateItem {
    fn convert<S: PrecisionSettings>(self) -> Self {
        let convert = |data: TensorData| data.convert::<S::FloatElem>();
        let momentum = self.momentum;
        Self {
            momentum: MomentumItem {
                moment_1: convert(momentum.moment_1),
                moment_2: convert(momentum.moment_2),
                ..momentum
            },
            master: self.master.map(convert),
        }
    }
}

macro_rules! ranked {
    ($($rank:ident = $dimensions:literal),*) => {
        /// An entry, by the dimensions of its parameter.
        #[derive(Clone, Debug, Serialize, Deserialize)]
        #[allow(missing_docs, reason = "names are what they say")]
        pub enum Ranked {
            $($rank(StateItem)),*
        }

        impl Ranked {
            fn new(item: StateItem) -> Self {
                match item.momentum.moment_1.rank() {
                    $($dimensions => Self::$rank(item),)*
                    _ => unreachable!("Burn's optimizers have no records of more than 8 dimensions"),
                }
            }

            fn into_inner(self) -> StateItem {
                match self {
                    $(Self::$rank(item) => item),*
                }
            }
        }
    };
}

ranked! {
    Rank0 = 0, Rank1 = 1, Rank2 = 2, Rank3 = 3, Rank4 = 4, Rank5 = 5, Rank6 = 6, Rank7 = 7, Rank8 = 8
}
