//! The group of one.

use std::{fmt, ops::Range, sync::Arc};

use bytemuck::Pod;
use parking_lot::Mutex;

use super::{
    Call, GroupFault, Job, ProcessGroup, ReduceOp, Sent, Traffic, buffer::Element, engine::Engine,
    job::Queue, transport::Transport,
};

/// A group of one rank: every collective returns what it was given, and nothing is sent. Work runs on the thread that gives it.
pub struct SingleRank {
    queue: Arc<Queue>,
    engine: Mutex<Engine<Alone>>,
}

impl SingleRank {
    /// The only rank.
    pub fn new() -> Self {
        let queue = Arc::new(Queue::default());
        let engine = Mutex::new(Engine::new(Alone, queue.clone()));
        Self { queue, engine }
    }
}

impl Default for SingleRank {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for SingleRank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SingleRank")
    }
}

impl ProcessGroup for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn submit(&self, job: Job) {
        self.engine.lock().run(job, String::new());
    }

    fn abort(&self, reason: &str) {
        self.queue.fail(GroupFault::Aborted {
            rank: 0,
            reason: reason.to_owned(),
        });
    }

    fn traffic(&self) -> Traffic {
        self.queue.traffic.lock().clone()
    }

    fn declare_settings(&self, _: &str) {}
}

/// Nobody else.
struct Alone;

impl Transport for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn announce(&mut self, call: &Call) -> Result<Vec<Call>, GroupFault> {
        Ok(vec![call.clone()])
    }

    fn reduce_scatter<E: Element>(
        &mut self,
        _: &Call,
        buffer: &Arc<Vec<E>>,
        _: &[usize],
        _: ReduceOp,
    ) -> Result<Vec<E>, GroupFault> {
        Ok(buffer.to_vec())
    }

    fn transfer<P: Pod + Send + Sync>(
        &mut self,
        _: &Call,
        own: &Arc<Vec<P>>,
        _: &[Range<usize>],
        _: &[Range<usize>],
        _: impl FnOnce() -> Vec<P>,
    ) -> Result<Vec<P>, GroupFault> {
        Ok(own.to_vec())
    }

    fn take_sent(&mut self) -> Sent {
        Sent::default()
    }

    fn spread(&mut self, _: &GroupFault) {}

    fn leave(&mut self, _: u64) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::{Agree, HostBuffer, Split};

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
