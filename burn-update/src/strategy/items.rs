//! Outputs of models on their way to rank 0, which computes the metrics of all ranks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::vec::IntoIter;

use burn::tensor::{BasicOps, Tensor, TensorData, backend::Backend};
use burn::train::{
    ClassificationOutput, ItemLazy, MultiLabelClassificationOutput, RegressionOutput,
    SequenceOutput,
};
use burn_ranks::ProcessGroup;
use parking_lot::Mutex;

use super::status::StepStatus;
use crate::UpdateError;

/// How a rank's items are sent to rank 0: at most one a step.
pub(super) enum Items<T> {
    /// Between threads.
    Queues {
        /// This rank.
        rank: usize,
        /// One for each rank.
        queues: Arc<Vec<Mutex<VecDeque<T>>>>,
    },
    /// As bytes over the group.
    Bytes {
        format: Format<T>,
        /// The item of the current step.
        own: Vec<u8>,
    },
}

/// Converts an item to bytes, and bytes to an item.
pub(super) struct Format<T> {
    pack: fn(T) -> Vec<u8>,
    unpack: fn(&[u8]) -> Result<T, String>,
}

impl<T: RankItem> Format<T> {
    /// That of the item's type.
    pub(super) fn of_item() -> Self {
        Self {
            pack: T::into_bytes,
            unpack: T::from_bytes,
        }
    }
}

impl<T> Clone for Format<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Format<T> {}

impl<T> Items<T> {
    /// One for each rank of this process, in their order: threads without a format, or one rank
    /// with a format.
    pub(super) fn of_ranks(ranks: usize, format: Option<Format<T>>) -> impl Iterator<Item = Self> {
        let queues: Arc<Vec<_>> = Arc::new((0..ranks).map(|_| Mutex::default()).collect());
        (0..ranks).map(move |rank| match format {
            Some(format) => Self::Bytes {
                format,
                own: Vec::new(),
            },
            None => Self::Queues {
                rank,
                queues: queues.clone(),
            },
        })
    }

    /// Sends an item, before the ranks exchange their status.
    pub(super) fn give(&mut self, item: T) {
        match self {
            Self::Queues { rank, queues } => queues[*rank].lock().push_back(item),
            Self::Bytes { format, own } => *own = (format.pack)(item),
        }
    }

    /// Returns on rank 0 the items of the other ranks, with and in the order of their ranks; on the
    /// others nothing. Follows the exchange of statuses.
    ///
    /// # Errors
    ///
    /// [`UpdateError::Strategy`] for bytes that are no item; those of the group.
    pub(super) fn collect(
        &mut self,
        group: &dyn ProcessGroup,
        all: &[StepStatus],
    ) -> Result<Vec<(usize, T)>, UpdateError> {
        let senders: Vec<_> = (1..all.len()).filter(|&rank| all[rank].has_item).collect();
        match self {
            Self::Queues { rank: 0, queues } => {
                // Each item was queued before its rank's status was sent.
                let next = |rank: usize| Some((rank, queues[rank].lock().pop_front()?));
                Ok(senders.into_iter().filter_map(next).collect())
            }
            Self::Bytes { format, own } if !senders.is_empty() => {
                let own = core::mem::take(own);
                let all = group.gather_bytes_to("items for rank 0", 0, own)?;
                let read = |rank: usize, bytes: &[u8]| match (format.unpack)(bytes) {
                    Ok(item) => Ok((rank, item)),
                    Err(reason) => {
                        let reason = format!("an item of rank {rank} cannot be read: {reason}");
                        Err(UpdateError::Strategy(reason))
                    }
                };
                let of_all = |all: Vec<Vec<u8>>| {
                    let items = senders.iter().map(|&rank| read(rank, &all[rank]));
                    items.collect()
                };
                all.map_or(Ok(Vec::new()), of_all)
            }
            _ => Ok(Vec::new()),
        }
    }
}

/// An output of a model that is sent to rank 0's process, which computes the metrics of all ranks:
/// see [`UpdateStrategy::process`](crate::UpdateStrategy::process).
///
/// Burn's outputs are such items, sent whole. A [`SummedOutput`](crate::SummedOutput) has 16 bytes,
/// from which loss, accuracy and perplexity are computed. For one of your own, write what its
/// metrics need:
///
/// ```
/// use burn::train::ItemLazy;
/// use burn_update::RankItem;
///
/// struct Loss(f32);
///
/// impl ItemLazy for Loss {
///     type ItemSync = Self;
///     fn sync(self) -> Self { self }
/// }
///
/// impl RankItem for Loss {
///     fn into_bytes(self) -> Vec<u8> { self.0.to_le_bytes().into() }
///     fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
///         let bytes = bytes.try_into().map_err(|_| "a loss has four bytes")?;
///         Ok(Self(f32::from_le_bytes(bytes)))
///     }
/// }
/// ```
pub trait RankItem: ItemLazy {
    /// The data that the metrics need.
    fn into_bytes(self) -> Vec<u8>;

    /// The item, from the bytes of the same program on another rank.
    ///
    /// # Errors
    ///
    /// What is wrong with the bytes.
    fn from_bytes(bytes: &[u8]) -> Result<Self, String>
    where
        Self: Sized;
}

impl RankItem for () {
    fn into_bytes(self) -> Vec<u8> {
        Vec::new()
    }

    fn from_bytes(_: &[u8]) -> Result<Self, String> {
        Ok(())
    }
}

fn pack(tensors: &[TensorData]) -> Vec<u8> {
    let mut bytes = Vec::new();
    ciborium::into_writer(tensors, &mut bytes).expect("a vector takes all bytes");
    bytes
}

fn unpack(bytes: &[u8]) -> Result<IntoIter<TensorData>, String> {
    let tensors = ciborium::from_reader::<Vec<_>, _>(bytes);
    tensors.map_or_else(
        |error| Err(error.to_string()),
        |tensors| Ok(tensors.into_iter()),
    )
}

fn next<B: Backend, const D: usize, K: BasicOps<B>>(
    tensors: &mut IntoIter<TensorData>,
) -> Result<Tensor<B, D, K>, String> {
    let data = tensors.next().ok_or("a tensor is missing")?;
    let dtype = data.dtype;
    Ok(Tensor::from_data(data, (&Default::default(), dtype)))
}

/// For types of outputs that consist of a loss, an output and targets.
macro_rules! three_tensors {
    ($($item:ident)*) => {
        $(impl<B: Backend> RankItem for $item<B> {
            fn into_bytes(self) -> Vec<u8> {
                let (loss, output) = (self.loss.into_data(), self.output.into_data());
                pack(&[loss, output, self.targets.into_data()])
            }

            fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
                let mut tensors = unpack(bytes)?;
                let (loss, output) = (next(&mut tensors)?, next(&mut tensors)?);
                Ok(Self::new(loss, output, next(&mut tensors)?))
            }
        })*
    };
}

three_tensors!(ClassificationOutput MultiLabelClassificationOutput RegressionOutput);

impl<B: Backend> RankItem for SequenceOutput<B> {
    fn into_bytes(self) -> Vec<u8> {
        let (loss, logits) = (self.loss.into_data(), self.logits.into_data());
        let mut tensors = vec![loss, logits, self.targets.into_data()];
        tensors.extend(self.predictions.map(Tensor::into_data));
        pack(&tensors)
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let mut tensors = unpack(bytes)?;
        let (loss, logits) = (next(&mut tensors)?, next(&mut tensors)?);
        let targets = next(&mut tensors)?;
        let predictions = match tensors.len() {
            0 => None,
            _ => Some(next(&mut tensors)?),
        };
        Ok(Self::new(loss, logits, predictions, targets))
    }
}
