//! What a collective is: its operation, the description that ranks compare before it starts, the
//! cut of its buffer into one part a rank, and the count of what it has sent.

use std::{collections::BTreeMap, fmt, ops::Range};

use bytemuck::cast_slice;
use serde::{Deserialize, Serialize};

use super::{GroupFault, part::Part};

/// The collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
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

/// A collective as one rank calls it: texts, which all ranks compare, and the length of this rank's
/// byte string, if it has one, which may differ.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct Call {
    /// Position in this rank's sequence of collectives, counted from 0.
    pub sequence: u64,
    /// Operation, position and label.
    name: String,
    pub bytes: Option<usize>,
    /// Elements, reduction, root and split, if there are any.
    details: String,
}

/// Longest label in bytes: the rest is cut off, so that a call fits a message of [`CALL_BYTES`].
const LABEL_BYTES: usize = 400;

/// Length of a call as a message. It is the same for all calls, so that a rank can receive the
/// others' without knowing them.
pub(super) const CALL_BYTES: usize = 640;

impl Call {
    pub fn new(
        operation: Operation,
        sequence: u64,
        label: &str,
        details: String,
        bytes: Option<usize>,
    ) -> Self {
        let label = &label[..label.floor_char_boundary(LABEL_BYTES)];
        Self {
            sequence,
            name: format!("{operation} #{sequence} `{label}`"),
            bytes,
            details,
        }
    }

    pub fn to_message(&self) -> Vec<u8> {
        let mut message = Vec::with_capacity(CALL_BYTES);
        ciborium::into_writer(self, &mut message).expect("a vector takes all bytes");
        assert!(message.len() <= CALL_BYTES, "{self} is too long");
        message.resize(CALL_BYTES, 0);
        message
    }

    /// Reads the calls of all ranks, and checks that they are equal to that of `rank`.
    pub fn read_all(rank: usize, messages: &[Part]) -> Result<Vec<Self>, GroupFault> {
        let read = |message: &Part| ciborium::from_reader(message.bytes());
        let calls = messages.iter().map(read);
        let calls: Result<Vec<Self>, _> = calls.collect();
        let calls = calls.expect("ranks run the same program");
        let own = &calls[rank];
        let differs = |other: &Self| own.name != other.name || own.details != other.details;
        match calls.iter().position(differs) {
            None => Ok(calls),
            Some(peer) => Err(GroupFault::Mismatch {
                rank,
                call: own.to_string(),
                peer,
                peer_call: calls[peer].to_string(),
            }),
        }
    }
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if let Some(bytes) = self.bytes {
            write!(f, " of {bytes} bytes")?;
        }
        f.write_str(&self.details)
    }
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

impl fmt::Display for Split {
    /// The detail of a call that differs if the split does.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Counts(counts) = self else {
            return Ok(());
        };
        write!(f, ", split {:x}", crc32fast::hash(cast_slice(counts)))
    }
}

impl Split {
    /// The offsets of the ranks' parts, and the end, where equal parts have `equal` elements;
    /// `None` unless there is one part a rank.
    pub(super) fn offsets(&self, world_size: usize, equal: usize) -> Option<Vec<usize>> {
        let counts = match self {
            Self::Equal => vec![equal; world_size],
            Self::Counts(counts) => counts.clone(),
        };
        let mut offsets = vec![0_usize];
        for count in counts {
            offsets.push(offsets[offsets.len() - 1].checked_add(count)?);
        }
        (offsets.len() == world_size + 1).then_some(offsets)
    }
}

/// Each rank's part, in units of `size`.
pub(super) fn parts(offsets: &[usize], size: usize) -> Vec<Range<usize>> {
    let parts = offsets.windows(2);
    parts.map(|part| part[0] * size..part[1] * size).collect()
}

/// What a rank has sent to others in one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Completed calls.
    pub calls: u64,
    /// Elements of buffers; what a rank keeps for itself does not count.
    pub elements: u64,
    /// These elements in bytes.
    pub data_bytes: u64,
    /// Bytes of the messages that start each call.
    pub header_bytes: u64,
}

impl Sent {
    fn add(&mut self, other: Self) {
        self.calls += other.calls;
        self.elements += other.elements;
        self.data_bytes += other.data_bytes;
        self.header_bytes += other.header_bytes;
    }
}

/// What a rank has sent, by operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Traffic(BTreeMap<Operation, Sent>);

impl Traffic {
    /// What was sent in one operation. An all-reduce counts as such, although it is a
    /// reduce-scatter and an all-gather.
    pub fn of(&self, operation: Operation) -> Sent {
        self.0.get(&operation).copied().unwrap_or_default()
    }

    /// What was sent in the operations that move tensors: all-reduce, reduce-scatter, all-gather;
    /// without what ranks tell each other.
    pub fn of_tensors(&self) -> Sent {
        let mut total = Sent::default();
        for operation in [
            Operation::AllReduce,
            Operation::ReduceScatter,
            Operation::AllGather,
        ] {
            total.add(self.of(operation));
        }
        total
    }

    /// What was sent in all operations.
    pub fn total(&self) -> Sent {
        let mut total = Sent::default();
        self.0.values().for_each(|sent| total.add(*sent));
        total
    }

    pub(super) fn record(&mut self, operation: Operation, sent: Sent) {
        self.0.entry(operation).or_default().add(sent);
    }
}
