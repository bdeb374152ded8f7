//! Transport of items to rank 0, which computes the metrics of all ranks.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::status::Statuses;
use super::{RankItem, StrategyError};
use crate::ZeroError;
use crate::group::ProcessGroup;

/// How a rank's items get to rank 0.
pub(super) enum Items<T> {
    /// Not at all: rank 0 shows its own.
    Stay,
    /// To rank 0's thread.
    Send(Sender<T>),
    /// On rank 0, from the threads of the other ranks, in their order.
    Receive(Vec<Receiver<T>>),
    /// As bytes over the group: the items of the current step, each after its length.
    Bytes(Format<T>, Vec<u8>),
}

/// Items as bytes.
pub(super) struct Format<T> {
    pack: fn(T) -> Vec<u8>,
    unpack: fn(&[u8]) -> Result<T, String>,
}

impl<T> Clone for Format<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Format<T> {}

impl<T: RankItem> Format<T> {
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
        let first = core::iter::once(Self::Receive(receivers));
        first.chain(others).collect()
    }

    /// For a rank that is a process.
    pub(super) fn of_process(format: Option<Format<T>>) -> Self {
        format.map_or(Self::Stay, |format| Self::Bytes(format, Vec::new()))
    }

    /// Whether rank 0 gets the items of all.
    pub(super) fn are_shared(&self) -> bool {
        !matches!(self, Self::Stay)
    }

    /// Sends an item, before the ranks exchange their status.
    pub(super) fn give(&mut self, item: T) {
        match self {
            Self::Stay | Self::Receive(_) => {}
            // If rank 0 is gone, the exchange of statuses reports the fault.
            Self::Send(sender) => drop(sender.send(item)),
            Self::Bytes(format, bytes) => {
                let item = (format.pack)(item);
                bytes.extend_from_slice(&(item.len() as u64).to_le_bytes());
                bytes.extend_from_slice(&item);
            }
        }
    }

    /// On rank 0 the items of the others with their ranks, in their order; on others nothing. After the exchange of statuses.
    ///
    /// # Errors
    ///
    /// [`StrategyError::Item`]; those of the group.
    pub(super) fn collect(
        &mut self,
        group: &dyn ProcessGroup,
        statuses: &Statuses,
    ) -> Result<Vec<(usize, T)>, ZeroError> {
        let mut collected = Vec::new();
        match self {
            Self::Stay | Self::Send(_) => {}
            Self::Receive(receivers) => {
                for (rank, receiver) in (1..).zip(receivers) {
                    for _ in 0..statuses.of(rank).items {
                        // They were sent before the status.
                        collected.extend(receiver.try_recv().map(|item| (rank, item)));
                    }
                }
            }
            Self::Bytes(format, items) => {
                if statuses.all().skip(1).all(|status| status.items == 0) {
                    return Ok(collected);
                }
                let own = core::mem::take(items);
                let all = group.gather_bytes_to("items for rank 0", 0, own)?;
                for (rank, bytes) in all.iter().flatten().enumerate().skip(1) {
                    let read = unpack(*format, bytes);
                    let read = read.map_err(|reason| StrategyError::Item { rank, reason })?;
                    collected.extend(read.into_iter().map(|item| (rank, item)));
                }
            }
        }
        Ok(collected)
    }
}

fn unpack<T>(format: Format<T>, mut bytes: &[u8]) -> Result<Vec<T>, String> {
    let mut items = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk() {
        let length = u64::from_le_bytes(*length) as usize;
        let (item, rest) = rest.split_at_checked(length).ok_or("it is cut off")?;
        items.push((format.unpack)(item)?);
        bytes = rest;
    }
    Ok(items)
}
