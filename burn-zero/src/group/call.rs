//! The description of a collective that ranks compare before it starts, and the cut of a buffer into one part a rank.

use std::{fmt, ops::Range};

use serde::{Deserialize, Serialize};

use super::{BufferDtype, GroupFault, HostBuffer, ReduceOp};
use crate::ZeroError;

/// The collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Operation {
    /// Every rank gets the reduction of all buffers.
    AllReduce,
    /// Every rank gets its part of the reduction.
    ReduceScatter,
    /// Every rank gets all parts, in the order of ranks.
    AllGather,
    /// Every rank gets the root's buffer.
    Broadcast,
    /// Every rank waits for all others.
    Barrier,
    /// Every rank gets a byte string of each rank.
    GatherBytes,
    /// One rank gets a byte string of each rank.
    GatherBytesTo,
}

impl Operation {
    /// Whether ranks give byte strings, whose lengths may differ.
    fn is_of_bytes(self) -> bool {
        matches!(self, Self::GatherBytes | Self::GatherBytesTo)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
            Self::Barrier => "barrier",
            Self::GatherBytes => "gather_bytes",
            Self::GatherBytesTo => "gather_bytes_to",
        })
    }
}

/// A collective as one rank calls it. Ranks that do not make the same call in the same place stop with
/// [`GroupFault::Mismatch`], which shows both.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Position in this rank's sequence of collectives, counted from 0.
    pub sequence: u64,
    /// What is called.
    pub operation: Operation,
    /// Type of the buffer's elements, if there is a buffer.
    pub dtype: Option<BufferDtype>,
    /// Elements of the whole buffer; bytes of this rank's own string for [`Operation::GatherBytes`] and
    /// [`Operation::GatherBytesTo`], where ranks may differ.
    pub elements: u64,
    /// How elements are reduced, if they are.
    pub reduce: Option<ReduceOp>,
    /// The sender of a [`Operation::Broadcast`], or the receiver of a [`Operation::GatherBytesTo`].
    pub root: Option<usize>,
    /// Hash of the parts' sizes where the caller chose them, else 0.
    pub split: u64,
    /// What the rank has declared ([`ProcessGroup::declare_settings`](super::ProcessGroup::declare_settings)), else empty.
    pub settings: String,
    /// The caller's name for it, such as "gradients of bucket 3 (blocks.0.mlp.weight)".
    pub label: String,
}

/// Longest label in bytes: the rest is cut off, so that a call fits a message of fixed size.
const LABEL_BYTES: usize = 400;

impl Call {
    /// Whether `other` is the same call on another rank.
    pub fn matches(&self, other: &Self) -> bool {
        let mut other = other.clone();
        if self.operation.is_of_bytes() {
            other.elements = self.elements;
        }
        *self == other
    }

    pub(super) fn new(operation: Operation, label: &str) -> Self {
        Self {
            sequence: 0,
            operation,
            dtype: None,
            elements: 0,
            reduce: None,
            root: None,
            split: 0,
            settings: String::new(),
            label: label[..label.floor_char_boundary(LABEL_BYTES)].to_owned(),
        }
    }

    pub(super) fn of_buffer(operation: Operation, label: &str, buffer: &HostBuffer) -> Self {
        Self {
            dtype: Some(buffer.dtype()),
            elements: buffer.len() as u64,
            ..Self::new(operation, label)
        }
    }

    /// Returns [`ZeroError::BufferLength`] unless the buffer of `elements` elements `fits`.
    pub(super) fn require(
        &self,
        fits: bool,
        elements: usize,
        expected: impl FnOnce() -> String,
    ) -> Result<(), ZeroError> {
        match fits {
            true => Ok(()),
            false => Err(ZeroError::BufferLength {
                call: format!("{} `{}`", self.operation, self.label),
                elements,
                expected: expected(),
            }),
        }
    }

    /// The first rank whose call differs from this one.
    pub(super) fn check(&self, rank: usize, calls: &[Self]) -> Result<(), GroupFault> {
        match calls.iter().position(|call| !self.matches(call)) {
            None => Ok(()),
            Some(peer) => Err(GroupFault::Mismatch {
                rank,
                call: self.to_string(),
                peer,
                peer_call: calls[peer].to_string(),
            }),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{} `{}`", self.operation, self.sequence, self.label)?;
        match (self.dtype, self.operation) {
            (Some(dtype), _) => write!(f, " of {} {dtype}", self.elements)?,
            (None, operation) if operation.is_of_bytes() => {
                write!(f, " of {} bytes", self.elements)?;
            }
            (None, _) => {}
        }
        if let Some(op) = self.reduce {
            write!(f, ", {op}")?;
        }
        if let Some(root) = self.root {
            let way = match self.operation {
                Operation::GatherBytesTo => "to",
                _ => "from",
            };
            write!(f, ", {way} rank {root}")?;
        }
        if self.split != 0 {
            write!(f, ", split {:x}", self.split)?;
        }
        if !self.settings.is_empty() {
            write!(f, ", in `{}`", self.settings)?;
        }
        Ok(())
    }
}

/// Longest declaration in bytes.
const DECLARED_BYTES: usize = 100;

/// The rank's declaration; a text that does not fit the message is cut, and the hash of all of it added.
pub(super) fn declaration(text: &str) -> String {
    if text.len() <= DECLARED_BYTES {
        return text.to_owned();
    }
    let shown = &text[..text.floor_char_boundary(DECLARED_BYTES)];
    format!("{shown} ... {:x}", stable_hash(text.bytes()))
}

/// FNV-1a: the same on every machine and in every process, unlike the standard library's hashers.
fn stable_hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// How a buffer is cut into one part a rank, in the order of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// Equally long parts: the buffer's length is a multiple of the world size.
    #[default]
    Equal,
    /// Elements of each rank's part, possibly 0; the same list on all ranks.
    Counts(Vec<usize>),
}

impl Split {
    pub(super) fn hash(&self) -> u64 {
        match self {
            Self::Equal => 0,
            Self::Counts(counts) => {
                let counts = counts.iter().map(|&count| count as u64);
                stable_hash(counts.flat_map(u64::to_le_bytes))
            }
        }
    }

    /// The offsets of the ranks' parts in a whole buffer, and its end.
    pub(super) fn of_whole(
        &self,
        elements: usize,
        world_size: usize,
        call: &Call,
    ) -> Result<Vec<usize>, ZeroError> {
        let offsets = self.offsets(elements / world_size, world_size);
        let total = offsets[offsets.len() - 1];
        let fits = total == elements && offsets.len() == world_size + 1;
        call.require(fits, elements, || {
            format!("the parts of {world_size} ranks must add up to it: {total}")
        })?;
        Ok(offsets)
    }

    /// The offsets of the ranks' parts, and the end, given the number of elements of this rank's part.
    pub(super) fn of_part(
        &self,
        elements: usize,
        rank: usize,
        world_size: usize,
        call: &Call,
    ) -> Result<Vec<usize>, ZeroError> {
        let offsets = self.offsets(elements, world_size);
        let own = offsets.get(rank + 1).map(|end| end - offsets[rank]);
        let fits = own == Some(elements) && offsets.len() == world_size + 1;
        call.require(fits, elements, || {
            format!("the split says {own:?} for rank {rank} of {world_size}")
        })?;
        Ok(offsets)
    }

    /// The offsets of the parts; fewer than world size + 1 if a sum overflows.
    fn offsets(&self, equal: usize, world_size: usize) -> Vec<usize> {
        let counts = match self {
            Self::Equal => vec![equal; world_size],
            Self::Counts(counts) => counts.clone(),
        };
        let ends = counts.iter().scan(0_usize, |end, &count| {
            *end = end.checked_add(count)?;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    }
}

/// The offsets of parts whose lengths differ by at most 1, and the end.
pub(super) fn balanced(elements: usize, world_size: usize) -> Vec<usize> {
    let (each, longer) = (elements / world_size, elements % world_size);
    (0..=world_size)
        .map(|rank| rank * each + rank.min(longer))
        .collect()
}

/// Each rank's part.
pub(super) fn parts(offsets: &[usize]) -> Vec<Range<usize>> {
    offsets.windows(2).map(|part| part[0]..part[1]).collect()
}
