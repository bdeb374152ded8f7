//! What a rank is about to do: the fingerprint that starts every collective.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{BufferDtype, GroupFault, ReduceOp};

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
    /// All operations.
    pub const ALL: [Self; 7] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::Broadcast,
        Self::Barrier,
        Self::GatherBytes,
        Self::GatherBytesTo,
    ];

    /// Whether ranks bring byte strings, whose lengths may differ.
    pub(crate) fn is_of_bytes(self) -> bool {
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
    /// The rank that everything comes from, for a broadcast; that everything goes to, for [`Operation::GatherBytesTo`].
    pub root: Option<usize>,
    /// Hash of the parts' sizes where the caller chose them, else 0.
    pub split: u64,
    /// What the rank has declared ([`ProcessGroup::declare_settings`](super::ProcessGroup::declare_settings)), else empty.
    pub settings: String,
    /// What the caller calls it, such as "gradients of bucket 3 (blocks.0.mlp.weight)".
    pub label: String,
}

/// Longest label in bytes: the rest is cut off, so that a call fits a message of fixed size.
pub(crate) const LABEL_BYTES: usize = 400;

impl Call {
    /// Whether `other` is the same call on another rank.
    pub fn matches(&self, other: &Self) -> bool {
        let mut other = other.clone();
        if self.operation.is_of_bytes() {
            other.elements = self.elements;
        }
        *self == other
    }

    /// The first rank whose call differs from this one.
    pub(crate) fn check(&self, rank: usize, calls: &[Self]) -> Result<(), GroupFault> {
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

/// What a rank declares, as far as it fits a message; of a longer text the hash of all of it.
pub(crate) fn declaration(text: &str) -> String {
    if text.len() <= DECLARED_BYTES {
        return text.to_owned();
    }
    let shown = &text[..text.floor_char_boundary(DECLARED_BYTES)];
    format!("{shown} ... {:x}", stable_hash(text.bytes()))
}

/// Cuts a label to [`LABEL_BYTES`], between characters.
pub(crate) fn cut_label(label: &str) -> String {
    label[..label.floor_char_boundary(LABEL_BYTES)].to_owned()
}

/// FNV-1a: the same on every machine and in every process, unlike the standard library's hashers.
pub(crate) fn stable_hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
