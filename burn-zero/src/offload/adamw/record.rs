//! The record: that of Burn's AdamW, and masters of low-precision parameters.

use std::collections::HashMap;

use burn::module::ParamId;
use burn::record::{PrecisionSettings, Record};
use burn::tensor::{TensorData, backend::Backend};
use serde::{Deserialize, Serialize};

use super::state::{Entry, Saved};
use crate::offload::OffloadError;

/// State of an [`OffloadedAdamW`](super::OffloadedAdamW), on the host: nothing of it goes through the device.
///
/// Written with named fields (`NamedMpkFileRecorder`, JSON) it is a record of Burn's AdamW and the other way round: moments and
/// step counts by parameter. Where a parameter is of a lower precision than f32 there is its `master` too, which Burn skips; if
/// none comes, or one that is not of the module's weights, the weights are the master. It says nothing of the ratio and
/// loads at any.
///
/// It shares the optimizer's state: a step that is taken while it is alive copies what it changes.
pub struct OffloadRecord<I: Backend> {
    pub(super) entries: HashMap<ParamId, Entry<I>>,
    /// Whether there was a third moment.
    amsgrad: bool,
}

impl<I: Backend> OffloadRecord<I> {
    pub(super) fn new(entries: HashMap<ParamId, Entry<I>>) -> Self {
        Self {
            entries,
            amsgrad: false,
        }
    }

    /// # Errors
    ///
    /// [`OffloadError::AmsGrad`].
    pub(super) fn into_entries(self) -> Result<HashMap<ParamId, Entry<I>>, OffloadError> {
        match self.amsgrad {
            true => Err(OffloadError::AmsGrad),
            false => Ok(self.entries),
        }
    }

    /// Parameters that it has state of.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none: before the first step.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<I: Backend> Clone for OffloadRecord<I> {
    fn clone(&self) -> Self {
        Self {
            entries: self.entries.clone(),
            amsgrad: self.amsgrad,
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
        let entries = self.entries.into_iter();
        let items = entries.map(|(id, entry)| {
            let item = EntryItem::V1(Ranked::new::<S>(entry.save()));
            (id.serialize(), item)
        });
        items.collect()
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, _device: &B::Device) -> Self {
        let mut amsgrad = false;
        let entries = item.into_iter().map(|(id, EntryItem::V1(ranked))| {
            let item = ranked.into_inner();
            amsgrad |= item.momentum.max_moment_2.is_some();
            (
                ParamId::deserialize(&id),
                Entry::Saved(Box::new(item.into())),
            )
        });
        let entries = entries.collect();
        Self { entries, amsgrad }
    }
}

/// A parameter's entry in a file: Burn's `AdaptorRecordItem` of AdamW, name for name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum EntryItem {
    /// The only version.
    V1(Ranked),
}

/// An entry, by the dimensions of its parameter.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[allow(missing_docs, reason = "names are what they say")]
pub enum Ranked {
    Rank0(StateItem),
    Rank1(StateItem),
    Rank2(StateItem),
    Rank3(StateItem),
    Rank4(StateItem),
    Rank5(StateItem),
    Rank6(StateItem),
    Rank7(StateItem),
    Rank8(StateItem),
}

/// State of AdamW.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct StateItem {
    momentum: MomentumItem,
    #[serde(default)]
    master: Option<TensorData>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct MomentumItem {
    time: usize,
    moment_1: TensorData,
    moment_2: TensorData,
    #[serde(default)]
    max_moment_2: Option<TensorData>,
}

impl Ranked {
    fn new<S: PrecisionSettings>(saved: Saved) -> Self {
        let convert = |data: TensorData| data.convert::<S::FloatElem>();
        let rank = saved.moment_1.rank();
        let item = StateItem {
            momentum: MomentumItem {
                time: saved.time,
                moment_1: convert(saved.moment_1),
                moment_2: convert(saved.moment_2),
                max_moment_2: None,
            },
            master: saved.master.map(convert),
        };
        match rank {
            0 => Self::Rank0(item),
            1 => Self::Rank1(item),
            2 => Self::Rank2(item),
            3 => Self::Rank3(item),
            4 => Self::Rank4(item),
            5 => Self::Rank5(item),
            6 => Self::Rank6(item),
            7 => Self::Rank7(item),
            8 => Self::Rank8(item),
            _ => unreachable!("Burn's optimizers have no records of more than 8 dimensions"),
        }
    }

    fn into_inner(self) -> StateItem {
        match self {
            Self::Rank0(item)
            | Self::Rank1(item)
            | Self::Rank2(item)
            | Self::Rank3(item)
            | Self::Rank4(item)
            | Self::Rank5(item)
            | Self::Rank6(item)
            | Self::Rank7(item)
            | Self::Rank8(item) => item,
        }
    }
}

impl From<StateItem> for Saved {
    fn from(item: StateItem) -> Self {
        let MomentumItem {
            time,
            moment_1,
            moment_2,
            ..
        } = item.momentum;
        Self {
            time,
            moment_1,
            moment_2,
            master: item.master,
        }
    }
}
