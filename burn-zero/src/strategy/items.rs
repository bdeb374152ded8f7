//! The way of items to rank 0, which computes the metrics of all ranks.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::word::Words;
use super::{RankItem, StrategyError};
use crate::ZeroError;
use crate::group::ProcessGroup;

/// How a rank's items get to rank 0.
pub(super) enum Items<T> {
    /// They stay where they are: rank 0 shows its own.
    Stay,
    /// To a thread.
    Send(Sender<T>),
    /// From the threads of the other ranks, in their order.
    Receive(Vec<Receiver<T>>),
    /// Over the group. Those that wait to be sent.
    Carry(Carrier<T>, Vec<u8>),
}

/// Items as bytes.
pub(super) struct Carrier<T> {
    pack: fn(T) -> Vec<u8>,
    unpack: fn(&[u8]) -> Result<T, String>,
}

impl<T> Clone for Carrier<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Carrier<T> {}

impl<T: RankItem> Carrier<T> {
    pub(super) fn new() -> Self {
        Self {
            pack: T::into_bytes,
            unpack: T::from_bytes,
        }
    }
}

impl<T> Items<T> {
    /// For ranks that are threads, in their order.
    pub(super) fn between_threads(ranks: usize) -> Vec<Self> {
        let (senders, receivers): (Vec<_>, Vec<_>) = (1..ranks).map(|_| channel()).unzip();
        let others = senders.into_iter().map(Self::Send);
        core::iter::once(Self::Receive(receivers))
            .chain(others)
            .collect()
    }

    /// For a rank that is a process.
    pub(super) fn of_process(carrier: Option<Carrier<T>>) -> Self {
        match carrier {
            Some(carrier) => Self::Carry(carrier, Vec::new()),
            None => Self::Stay,
        }
    }

    /// Whether rank 0 gets the items of all.
    pub(super) fn are_shared(&self) -> bool {
        !matches!(self, Self::Stay)
    }

    /// Brings an item on its way, before the ranks exchange their words.
    pub(super) fn give(&mut self, item: T) {
        match self {
            Self::Stay | Self::Receive(_) => {}
            // Without rank 0 the exchange of words fails, with the reason.
            Self::Send(sender) => drop(sender.send(item)),
            Self::Carry(carrier, bytes) => {
                let item = (carrier.pack)(item);
                bytes.extend_from_slice(&(item.len() as u64).to_le_bytes());
                bytes.extend_from_slice(&item);
            }
        }
    }

    /// On rank 0 the items of the others, rank by rank, after the words; on others nothing.
    ///
    /// # Errors
    ///
    /// [`StrategyError::Item`]; those of the group.
    pub(super) fn collect(
        &mut self,
        group: &dyn ProcessGroup,
        words: &Words,
    ) -> Result<Vec<T>, ZeroError> {
        let mut items = Vec::new();
        match self {
            Self::Stay | Self::Send(_) => {}
            Self::Receive(receivers) => {
                for (index, receiver) in receivers.iter().enumerate() {
                    for _ in 0..words.items(index + 1) {
                        // They were given before the words.
                        items.extend(receiver.try_recv());
                    }
                }
            }
            Self::Carry(carrier, bytes) => {
                let own = core::mem::take(bytes);
                let all = group.gather_bytes_to("items for rank 0", 0, own)?;
                for (rank, bytes) in all.iter().flatten().enumerate().skip(1) {
                    let read = unpack(*carrier, bytes);
                    let read = read.map_err(|reason| StrategyError::Item { rank, reason })?;
                    items.extend(read);
                }
            }
        }
        Ok(items)
    }
}

fn unpack<T>(carrier: Carrier<T>, mut bytes: &[u8]) -> Result<Vec<T>, String> {
    let mut items = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let length = u64::from_le_bytes(*length) as usize;
        let (item, rest) = rest.split_at_checked(length).ok_or("it is cut off")?;
        items.push((carrier.unpack)(item)?);
        bytes = rest;
    }
    Ok(items)
}
