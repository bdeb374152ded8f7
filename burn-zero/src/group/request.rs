//! A collective to be run: what is asked for, and whether it can be.

use super::{
    Call, HostBuffer, Operation, ReduceOp,
    call::{cut_label, stable_hash},
};
use crate::ZeroError;

/// How a buffer is cut into one part a rank, in the order of ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Split {
    /// Equally long parts: the buffer's length is a multiple of the world size.
    #[default]
    Equal,
    /// So many elements a rank, zero included; the same list on all ranks.
    Counts(Vec<usize>),
}

/// A collective with its buffers.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// Reduces a buffer over all ranks; every rank gets all of it.
    AllReduce {
        /// Sum or mean.
        op: ReduceOp,
        /// This rank's buffer, as long as all others'.
        buffer: HostBuffer,
    },
    /// Reduces a buffer over all ranks; every rank gets its part.
    ReduceScatter {
        /// Sum or mean.
        op: ReduceOp,
        /// This rank's whole buffer, as long as all others'.
        buffer: HostBuffer,
        /// Which part is whose.
        split: Split,
    },
    /// Puts the parts of all ranks behind each other.
    AllGather {
        /// This rank's part.
        part: HostBuffer,
        /// Which part is whose.
        split: Split,
        /// A buffer of the whole length whose memory is used for the result.
        into: Option<HostBuffer>,
    },
    /// Gives the root's buffer to all.
    Broadcast {
        /// The rank that it comes from.
        root: usize,
        /// The root's buffer; elsewhere one of the same length, whose values are overwritten.
        buffer: HostBuffer,
    },
    /// Waits until all ranks are here.
    Barrier,
    /// Gives a byte string of each rank to all.
    GatherBytes(Vec<u8>),
    /// Gives a byte string of each rank to one.
    GatherBytesTo {
        /// The rank that gets them.
        root: usize,
        /// This rank's; lengths may differ.
        bytes: Vec<u8>,
    },
}

/// A collective and what the caller calls it.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Named in errors and compared over ranks: name the step and the parameters. Cut off after 400 bytes.
    pub label: String,
    /// What to do.
    pub task: Task,
}

/// What a collective gives back.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// A barrier's, and that of a gathering for another rank.
    Nothing,
    /// The whole buffer, or this rank's part of it.
    Buffer(HostBuffer),
    /// The byte string of each rank.
    Bytes(Vec<Vec<u8>>),
}

impl Request {
    /// A request under a label.
    pub fn new(label: &str, task: Task) -> Self {
        Self {
            label: cut_label(label),
            task,
        }
    }

    /// The call that this request is, and where each rank's part begins (world size + 1 offsets).
    pub(crate) fn plan(
        &self,
        rank: usize,
        world_size: usize,
    ) -> Result<(Call, Vec<usize>), ZeroError> {
        let mut call = self.call();
        if let Some(root) = call.root.filter(|root| *root >= world_size) {
            return Err(ZeroError::NoSuchRank {
                call: call.to_string(),
                rank: root,
                world_size,
            });
        }
        let offsets = match &self.task {
            Task::AllReduce { buffer, .. } => balanced(buffer.len(), world_size),
            Task::Broadcast { buffer, .. } => balanced(buffer.len(), world_size),
            Task::ReduceScatter { buffer, split, .. } => {
                let offsets = offsets(split, buffer.len().checked_div(world_size), world_size);
                let (total, elements) = (*offsets.last().unwrap_or(&0), buffer.len());
                let expected =
                    format!("the parts of {world_size} ranks must add up to it: {total}");
                self.require(
                    total == elements && offsets.len() == world_size + 1,
                    elements,
                    expected,
                )?;
                offsets
            }
            Task::AllGather { part, split, into } => {
                let offsets = offsets(split, Some(part.len()), world_size);
                let own = offsets.get(rank + 1).map(|end| end - offsets[rank]);
                let expected = format!("the split says {own:?} for rank {rank} of {world_size}");
                let whole = own == Some(part.len()) && offsets.len() == world_size + 1;
                self.require(whole, part.len(), expected)?;
                call.elements = offsets[world_size] as u64;
                if let Some(into) = into {
                    let fits = into.len() == offsets[world_size] && into.dtype() == part.dtype();
                    let expected =
                        format!("{} of {} are gathered into it", call.elements, part.dtype());
                    self.require(fits, into.len(), expected)?;
                }
                offsets
            }
            Task::Barrier | Task::GatherBytes(_) | Task::GatherBytesTo { .. } => {
                vec![0; world_size + 1]
            }
        };
        Ok((call, offsets))
    }

    fn require(&self, holds: bool, elements: usize, expected: String) -> Result<(), ZeroError> {
        if holds {
            return Ok(());
        }
        let call = format!("{} `{}`", self.call().operation, self.label);
        Err(ZeroError::BufferLength {
            call,
            elements,
            expected,
        })
    }

    /// The call, without what only the group knows.
    fn call(&self) -> Call {
        let (operation, buffer) = match &self.task {
            Task::AllReduce { buffer, .. } => (Operation::AllReduce, Some(buffer)),
            Task::ReduceScatter { buffer, .. } => (Operation::ReduceScatter, Some(buffer)),
            Task::AllGather { part, .. } => (Operation::AllGather, Some(part)),
            Task::Broadcast { buffer, .. } => (Operation::Broadcast, Some(buffer)),
            Task::Barrier => (Operation::Barrier, None),
            Task::GatherBytes(_) => (Operation::GatherBytes, None),
            Task::GatherBytesTo { .. } => (Operation::GatherBytesTo, None),
        };
        let elements = match (&self.task, buffer) {
            (Task::GatherBytes(bytes) | Task::GatherBytesTo { bytes, .. }, _) => bytes.len(),
            (_, buffer) => buffer.map_or(0, HostBuffer::len),
        };
        Call {
            sequence: 0,
            operation,
            dtype: buffer.map(HostBuffer::dtype),
            elements: elements as u64,
            reduce: match &self.task {
                Task::AllReduce { op, .. } | Task::ReduceScatter { op, .. } => Some(*op),
                _ => None,
            },
            root: match &self.task {
                Task::Broadcast { root, .. } | Task::GatherBytesTo { root, .. } => Some(*root),
                _ => None,
            },
            split: match &self.task {
                Task::ReduceScatter { split, .. } | Task::AllGather { split, .. } => split.hash(),
                _ => 0,
            },
            settings: String::new(),
            label: self.label.clone(),
        }
    }
}

impl Split {
    fn hash(&self) -> u64 {
        match self {
            Self::Equal => 0,
            Self::Counts(counts) => stable_hash(
                counts
                    .iter()
                    .flat_map(|&count| (count as u64).to_le_bytes()),
            ),
        }
    }
}

/// Where the parts begin, and where the last one ends; nothing if the parts cannot be counted.
fn offsets(split: &Split, equal: Option<usize>, world_size: usize) -> Vec<usize> {
    let counts = match split {
        Split::Equal => vec![equal.unwrap_or(0); world_size],
        Split::Counts(counts) => counts.clone(),
    };
    let ends = counts.iter().scan(0_usize, |end, &count| {
        *end = end.checked_add(count)?;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// Parts whose lengths differ by at most 1.
fn balanced(elements: usize, world_size: usize) -> Vec<usize> {
    let (each, longer) = (elements / world_size, elements % world_size);
    (0..=world_size)
        .map(|rank| rank * each + rank.min(longer))
        .collect()
}

impl Output {
    /// The buffer. Panics if the collective gives none.
    pub(crate) fn into_buffer(self) -> HostBuffer {
        match self {
            Self::Buffer(buffer) => buffer,
            other => unreachable!("a collective over buffers gave {other:?}"),
        }
    }

    /// The byte strings. Panics if the collective gives none.
    pub(crate) fn into_bytes(self) -> Vec<Vec<u8>> {
        match self {
            Self::Bytes(bytes) => bytes,
            other => unreachable!("gather_bytes gave {other:?}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::BufferDtype;

    #[test]
    fn balanced_parts_cover_everything() {
        assert_eq!(balanced(10, 4), [0, 3, 6, 8, 10]);
        assert_eq!(balanced(2, 4), [0, 1, 2, 2, 2]);
    }

    #[test]
    fn what_cannot_be_cut_is_refused_before_it_is_sent() {
        let task = |split| Task::ReduceScatter {
            op: ReduceOp::Sum,
            buffer: HostBuffer::zeros(BufferDtype::F32, 10),
            split,
        };
        for split in [
            Split::Equal,
            Split::Counts(vec![10, 0]),
            Split::Counts(vec![5, 4, 0, 0]),
            Split::Counts(vec![usize::MAX, 1, 5, 5]),
        ] {
            let error = Request::new("bucket 3", task(split))
                .plan(0, 4)
                .unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains("reduce_scatter `bucket 3`: the buffer has 10"),
                "{error}"
            );
        }
        assert!(
            Request::new("", task(Split::Counts(vec![0, 7, 0, 3])))
                .plan(0, 4)
                .is_ok()
        );
    }

    #[test]
    fn a_broadcast_needs_its_root() {
        let buffer = HostBuffer::zeros(BufferDtype::F16, 1);
        let error = Request::new("weights", Task::Broadcast { root: 2, buffer }).plan(0, 2);
        assert!(matches!(
            error,
            Err(ZeroError::NoSuchRank {
                rank: 2,
                world_size: 2,
                ..
            })
        ));
    }
}
