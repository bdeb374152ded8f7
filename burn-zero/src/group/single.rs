//! The group of one.

use parking_lot::Mutex;

use super::{GroupFault, Output, Pending, ProcessGroup, Request, Sent, Task, Traffic};
use crate::ZeroError;

/// A group of one rank: every collective returns what it was given, and nothing is sent.
#[derive(Debug, Default)]
pub struct SingleRank {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    traffic: Traffic,
    fault: Option<GroupFault>,
}

impl SingleRank {
    /// The only rank.
    pub fn new() -> Self {
        Self::default()
    }

    fn run(&self, request: Request) -> Result<Output, ZeroError> {
        let (call, _) = request.plan(0, 1)?;
        let mut state = self.state.lock();
        if let Some(fault) = &state.fault {
            return Err(fault.clone().into());
        }
        state.traffic.record(call.operation, Sent::default());
        Ok(match request.task {
            Task::Barrier => Output::Nothing,
            Task::GatherBytes(bytes) | Task::GatherBytesTo { bytes, .. } => {
                Output::Bytes(vec![bytes])
            }
            Task::AllReduce { buffer, .. }
            | Task::ReduceScatter { buffer, .. }
            | Task::Broadcast { buffer, .. } => Output::Buffer(buffer),
            Task::AllGather { part, .. } => Output::Buffer(part),
        })
    }
}

impl ProcessGroup for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn submit(&self, request: Request) -> Pending {
        Pending::ready(self.run(request))
    }

    fn abort(&self, reason: &str) {
        let fault = GroupFault::Aborted {
            rank: 0,
            reason: reason.to_owned(),
        };
        self.state.lock().fault.get_or_insert(fault);
    }

    fn traffic(&self) -> Traffic {
        self.state.lock().traffic.clone()
    }

    fn declare_settings(&self, _: &str) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::{Agree, HostBuffer, ReduceOp, Split};

    #[test]
    fn one_rank_is_the_identity_and_sends_nothing() {
        let group: &dyn ProcessGroup = &SingleRank::new();
        let buffer = HostBuffer::from(vec![1.0, -2.0, f32::INFINITY]);
        assert_eq!(
            group
                .all_reduce("a", ReduceOp::Mean, buffer.clone())
                .unwrap(),
            buffer
        );
        let part = group
            .reduce_scatter("b", ReduceOp::Sum, buffer.clone(), Split::Equal)
            .unwrap();
        assert_eq!(group.all_gather("c", part, Split::Equal).unwrap(), buffer);
        assert_eq!(group.broadcast("d", 0, buffer.clone()).unwrap(), buffer);
        assert_eq!(group.agree_sum("e", 2.5).unwrap(), 2.5);
        let own = group.gather_bytes_to("f", 0, vec![1, 2]).unwrap();
        assert_eq!(own, Some(vec![vec![1, 2]]));
        group.barrier("g").unwrap();
        let total = group.traffic().total();
        assert_eq!((total.calls, total.elements, total.data_bytes), (7, 0, 0));
    }

    #[test]
    fn requests_are_checked_as_in_larger_groups() {
        let group = SingleRank::new();
        let buffer = HostBuffer::from(vec![1.0; 3]);
        let split = Split::Counts(vec![2]);
        assert!(
            group
                .reduce_scatter("x", ReduceOp::Sum, buffer.clone(), split)
                .is_err()
        );
        assert!(group.broadcast("x", 1, buffer).is_err());
        assert!(group.gather_bytes_to("x", 1, Vec::new()).is_err());
    }

    #[test]
    fn an_aborted_group_says_why() {
        let group = SingleRank::new();
        group.abort("disk full");
        let error = group.barrier("end").unwrap_err();
        assert_eq!(error.to_string(), "rank 0 gave up: disk full");
    }
}
