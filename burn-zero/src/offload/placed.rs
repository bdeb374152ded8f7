//! AdamW whose state is on the device or in host memory, as one type.

use core::fmt;
use std::collections::HashMap;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::record::AdaptorRecord;
use burn::optim::{
    AdamW, AdamWConfig, GradientsParams, LearningRate, MultiGradientsParams, Optimizer,
};
use burn::record::{DoublePrecisionSettings, FullPrecisionSettings, PrecisionSettings, Record};
use burn::tensor::{DType, Element, backend::AutodiffBackend};
use burn_decorator::exact::Exact;
use ciborium::Value;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::host_state::{EntryItem, OffloadRecord};
use super::{HostAdamWConfig, OffloadConfig, OffloadedAdamW};
use crate::error::ZeroError;
use crate::settings::Memory;
use crate::update::ParameterShards;

/// AdamW with its state on the device ([`Memory::Device`], Burn's) or in host memory
/// ([`Memory::Host`], [`OffloadedAdamW`]), for a program where that is a setting: one type, so the
/// training is written and compiled once.
///
/// ```
/// use burn::{backend::Autodiff, nn::Linear};
/// use burn_update::Update;
/// use burn_zero::{HostAdamWConfig, Memory, PlacedAdamW};
///
/// # type B = Autodiff<burn_flex::Flex>;
/// # let offload = true;
/// let state = if offload { Memory::Host } else { Memory::Device };
/// let adamw = PlacedAdamW::new(HostAdamWConfig::default(), state)?;
/// let update = Update::<Linear<B>, B>::new(adamw);
/// # let _ = update;
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
///
/// Over ranks with [`Memory::Host`] set [`ZeroSettings::gradients`](crate::ZeroSettings::gradients)
/// to the host too, so that gradients leave the device during backward;
/// [`ZeroConfig::settings`](crate::ZeroConfig::settings) does.
///
/// Its record is AdamW's, wherever the state is: a training goes on with its state in the other
/// place, and Burn's AdamW and [`OffloadedAdamW`] load it and are loaded.
#[derive(Clone)]
pub enum PlacedAdamW<M: AutodiffModule<B>, B: AutodiffBackend> {
    /// On the device.
    Device(OptimizerAdaptor<AdamW, M, B>),
    /// In host memory.
    Host(OffloadedAdamW),
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> PlacedAdamW<M, B> {
    /// AdamW with its state in `state`. Burn's has these numbers as f32.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for a number out of its range.
    pub fn new(config: HostAdamWConfig, state: Memory) -> Result<Self, ZeroError> {
        config.validate()?;
        match state {
            Memory::Device => Ok(Self::Device(AdamWConfig::from(&config).init())),
            Memory::Host => OffloadConfig::new(config).init().map(Self::Host),
        }
    }

    /// Where its state is.
    pub fn place(&self) -> Memory {
        match self {
            Self::Device(_) => Memory::Device,
            Self::Host(_) => Memory::Host,
        }
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> Optimizer<M, B> for PlacedAdamW<M, B> {
    type Record = PlacedRecord<B>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        match self {
            Self::Device(adamw) => adamw.step(lr, module, grads),
            Self::Host(adamw) => adamw.step(lr, module, grads),
        }
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        match self {
            Self::Device(adamw) => adamw.step_multi(lr, module, grads),
            Self::Host(adamw) => adamw.step_multi(lr, module, grads),
        }
    }

    fn to_record(&self) -> PlacedRecord<B> {
        PlacedRecord(match self {
            Self::Device(adamw) => PlacedState::Device(adamw.to_record()),
            Self::Host(adamw) => PlacedState::Host {
                state: Optimizer::<M, B>::to_record(adamw),
                device: B::Device::default(),
            },
        })
    }

    fn load_record(self, record: PlacedRecord<B>) -> Self {
        match self {
            Self::Device(adamw) => Self::Device(adamw.load_record(record.0.into_burns())),
            Self::Host(adamw) => {
                let state = record.0.into_host();
                Self::Host(Optimizer::<M, B>::load_record(adamw, state))
            }
        }
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> fmt::Debug for PlacedAdamW<M, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(_) => f.debug_tuple("Device").finish_non_exhaustive(),
            Self::Host(adamw) => f.debug_tuple("Host").field(adamw).finish(),
        }
    }
}

/// The record of Burn's AdamW, the same for every module.
type BurnsRecord<B> =
    <OptimizerAdaptor<AdamW, ParameterShards<B>, B> as Optimizer<ParameterShards<B>, B>>::Record;

/// State of a [`PlacedAdamW`]. Its files are those of an [`OffloadRecord`], which are Burn's; every
/// recorder stores it in full precision.
#[derive(Clone)]
pub struct PlacedRecord<B: AutodiffBackend>(PlacedState<B>);

/// The state where it is.
#[derive(Clone)]
enum PlacedState<B: AutodiffBackend> {
    Device(BurnsRecord<B>),
    Host {
        state: OffloadRecord,
        /// Where it belongs if it is loaded to a device.
        device: B::Device,
    },
}

impl<B: AutodiffBackend> PlacedState<B> {
    fn into_burns(self) -> BurnsRecord<B> {
        match self {
            Self::Device(states) => states,
            Self::Host { state, device } if B::FloatElem::dtype() == DType::F64 => {
                on_device::<B, DoublePrecisionSettings>(state, &device)
            }
            Self::Host { state, device } => on_device::<B, FullPrecisionSettings>(state, &device),
        }
    }

    fn into_host(self) -> OffloadRecord {
        match self {
            Self::Device(states) => {
                let items = items_of::<B, FullPrecisionSettings>(states);
                Record::<B>::from_item::<FullPrecisionSettings>(items, &B::Device::default())
            }
            Self::Host { state, .. } => state,
        }
    }
}

/// The state on a device, one parameter after the other.
fn on_device<B: AutodiffBackend, S: PrecisionSettings>(
    state: OffloadRecord,
    device: &B::Device,
) -> BurnsRecord<B> {
    let items = Record::<B>::into_item::<S>(state).into_iter();
    let states = items.map(|(id, entry)| {
        let state = AdaptorRecord::from_item::<S>(reread(entry), device);
        (ParamId::deserialize(&id), state)
    });
    states.collect()
}

/// The state of a device for a file, one parameter after the other.
fn items_of<B: AutodiffBackend, S: PrecisionSettings>(
    states: BurnsRecord<B>,
) -> HashMap<String, EntryItem> {
    let items = states.into_iter().map(|(id, state)| {
        let entry = Record::<B>::into_item::<S>(Exact(state));
        (id.serialize(), reread(entry))
    });
    items.collect()
}

/// One type of AdamW's state in a file as another: both are written alike.
fn reread<To: DeserializeOwned>(item: impl Serialize) -> To {
    let value = Value::serialized(&item).and_then(|value| value.deserialized());
    value.expect("Burn's AdamW and that on the host have one form of state")
}

impl<B: AutodiffBackend> Record<B> for PlacedRecord<B> {
    type Item<S: PrecisionSettings> = HashMap<String, EntryItem>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        match self.0 {
            PlacedState::Device(states) => items_of::<B, S>(states),
            PlacedState::Host { state, .. } => Record::<B>::into_item::<S>(state),
        }
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        Self(PlacedState::Host {
            state: Record::<B>::from_item::<S>(item, device),
            device: device.clone(),
        })
    }
}

impl<B: AutodiffBackend> fmt::Debug for PlacedRecord<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (place, parameters) = match &self.0 {
            PlacedState::Device(states) => (Memory::Device, states.len()),
            PlacedState::Host { state, .. } => (Memory::Host, state.len()),
        };
        f.debug_struct("PlacedRecord")
            .field("place", &place)
            .field("parameters", &parameters)
            .finish_non_exhaustive()
    }
}
