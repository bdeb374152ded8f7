//! The group of one.

use std::{fmt, ops::Range, sync::Arc};

use bytemuck::Pod;
use parking_lot::Mutex;

use super::{
    Call, GroupFault, Job, ProcessGroup, ReduceOp, Sent, Traffic, buffer::Element, engine::Engine,
    job::Queue, transport::Transport,
};

/// A group of one rank: every collective returns its argument and sends nothing. Jobs run on the thread that submits them.
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

/// The collectives of one rank.
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
