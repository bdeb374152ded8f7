//! The communication thread: collectives, composed of the operations of a transport.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use bytemuck::{Pod, Zeroable};

use super::{
    Call, Collectives, GroupFault, HostBuffer, Operation, ReduceOp, Split,
    buffer::{Element, with_values},
    call::{balanced, parts},
    job::{Job, Next, Queue},
    transport::Transport,
};
use crate::ZeroError;

/// A rank's collectives, on its communication thread.
pub(super) struct Engine<T> {
    transport: T,
    queue: Arc<Queue>,
    /// Collectives so far.
    calls: u64,
    /// What the rank had declared when the running job was submitted.
    settings: String,
    /// Whether the other ranks know that the group is lost.
    spread: bool,
}

/// The message of a caught panic.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

impl<T: Transport> Engine<T> {
    pub fn new(transport: T, queue: Arc<Queue>) -> Self {
        Self {
            transport,
            queue,
            calls: 0,
            settings: String::new(),
            spread: false,
        }
    }

    /// Runs a rank's jobs until its group is dropped or lost, and then notifies the other ranks.
    pub fn work(mut self) -> T {
        let worked = catch_unwind(AssertUnwindSafe(|| self.run_all()));
        if let Err(panic) = worked {
            let (rank, message) = (self.transport.rank(), panic_message(&*panic));
            self.lose(GroupFault::PeerPanicked { rank, message });
        }
        match self.queue.fault() {
            None => self.transport.leave(self.calls),
            Some(fault) => self.lose(fault),
        }
        self.transport
    }

    fn run_all(&mut self) {
        loop {
            match self.queue.next(self.transport.patience()) {
                Next::Job(job, settings) => self.run(job, settings),
                Next::Nothing => self.transport.stay(),
                Next::End => return,
            }
        }
    }

    pub fn run(&mut self, job: Job, settings: String) {
        self.settings = settings;
        job.run(self);
    }

    fn lose(&mut self, fault: GroupFault) {
        if !std::mem::replace(&mut self.spread, true) {
            self.transport.spread(&fault);
        }
        self.queue.fail(fault);
    }

    /// Makes a call. Ranks first exchange its description: data is sent only if all make the same call.
    fn make<R>(
        &mut self,
        call: Call,
        run: impl FnOnce(&mut T, &Call, &[Call]) -> Result<R, GroupFault>,
    ) -> Result<R, ZeroError> {
        if let Some(fault) = self.queue.fault() {
            return Err(fault.into());
        }
        let call = Call {
            sequence: self.calls,
            settings: self.settings.clone(),
            ..call
        };
        let transport = &mut self.transport;
        let made = transport.announce(&call).and_then(|calls| {
            call.check(transport.rank(), &calls)?;
            run(transport, &call, &calls)
        });
        match made {
            Ok(output) => {
                self.calls += 1;
                let sent = self.transport.take_sent();
                self.queue.traffic.lock().record(call.operation, sent);
                Ok(output)
            }
            Err(fault) => {
                self.lose(fault.clone());
                Err(fault.into())
            }
        }
    }

    fn check_root(&self, call: &Call, root: usize) -> Result<(), ZeroError> {
        let world_size = self.transport.world_size();
        match root < world_size {
            true => Ok(()),
            false => Err(ZeroError::NoSuchRank {
                call: call.to_string(),
                rank: root,
                world_size,
            }),
        }
    }
}

impl<T: Transport> Collectives for Engine<T> {
    /// A reduce-scatter, so that every element is added and rounded by one rank, and an all-gather.
    fn all_reduce(
        &mut self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError> {
        let call = Call {
            reduce: Some(op),
            ..Call::of_buffer(Operation::AllReduce, label, &buffer)
        };
        let offsets = balanced(buffer.len(), self.transport.world_size());
        self.make(call, |transport, call, _| {
            Ok(with_values!(buffer, values => {
                let values = Arc::new(values);
                let part = transport.reduce_scatter(call, &values, &offsets, op)?;
                to_all(transport, call, part, &offsets, || reclaim(values))?.into()
            }))
        })
    }

    fn reduce_scatter(
        &mut self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
        split: &Split,
    ) -> Result<HostBuffer, ZeroError> {
        let call = Call {
            reduce: Some(op),
            split: split.hash(),
            ..Call::of_buffer(Operation::ReduceScatter, label, &buffer)
        };
        let offsets = split.of_whole(buffer.len(), self.transport.world_size(), &call)?;
        self.make(call, |transport, call, _| {
            Ok(with_values!(buffer, values =>
                transport.reduce_scatter(call, &Arc::new(values), &offsets, op)?.into()))
        })
    }

    fn all_gather(
        &mut self,
        label: &str,
        part: HostBuffer,
        split: &Split,
        into: Option<HostBuffer>,
    ) -> Result<HostBuffer, ZeroError> {
        let mut call = Call {
            split: split.hash(),
            ..Call::of_buffer(Operation::AllGather, label, &part)
        };
        let (rank, world_size) = (self.transport.rank(), self.transport.world_size());
        let offsets = split.of_part(part.len(), rank, world_size, &call)?;
        let elements = offsets[world_size];
        call.elements = elements as u64;
        if let Some(into) = &into {
            let fits = into.len() == elements && into.dtype() == part.dtype();
            call.require(fits, into.len(), || {
                format!("{elements} of {} are gathered into it", part.dtype())
            })?;
        }
        self.make(call, |transport, call, _| {
            Ok(with_values!(part, part => {
                let into = || into.and_then(Element::unwrap).unwrap_or_else(|| zeros(elements));
                to_all(transport, call, part, &offsets, into)?.into()
            }))
        })
    }

    /// A scatter and an all-gather: the root sends its buffer twice, whatever the world size.
    fn broadcast(
        &mut self,
        label: &str,
        root: usize,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError> {
        let call = Call {
            root: Some(root),
            ..Call::of_buffer(Operation::Broadcast, label, &buffer)
        };
        self.check_root(&call, root)?;
        let (rank, world_size) = (self.transport.rank(), self.transport.world_size());
        let offsets = balanced(buffer.len(), world_size);
        let own = offsets[rank + 1] - offsets[rank];
        let mut sends = vec![0..0; world_size];
        if rank == root {
            sends = parts(&offsets);
        }
        let mut places = vec![0..0; world_size];
        places[root] = 0..own;
        self.make(call, |transport, call, _| {
            Ok(with_values!(buffer, values => {
                let values = Arc::new(values);
                let part = transport.transfer(call, &values, &sends, &places, || zeros(own))?;
                to_all(transport, call, part, &offsets, || reclaim(values))?.into()
            }))
        })
    }

    fn barrier(&mut self, label: &str) -> Result<(), ZeroError> {
        self.make(Call::new(Operation::Barrier, label), |_, _, _| Ok(()))
    }

    fn gather_bytes(&mut self, label: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, ZeroError> {
        let call = Call {
            elements: bytes.len() as u64,
            ..Call::new(Operation::GatherBytes, label)
        };
        self.make(call, |transport, call, calls| {
            let offsets = lengths(calls);
            let all = to_all(transport, call, bytes, &offsets, || {
                zeros(offsets[calls.len()])
            })?;
            Ok(cut(&all, &offsets))
        })
    }

    fn gather_bytes_to(
        &mut self,
        label: &str,
        root: usize,
        bytes: Vec<u8>,
    ) -> Result<Option<Vec<Vec<u8>>>, ZeroError> {
        let call = Call {
            elements: bytes.len() as u64,
            root: Some(root),
            ..Call::new(Operation::GatherBytesTo, label)
        };
        self.check_root(&call, root)?;
        let is_root = self.transport.rank() == root;
        self.make(call, |transport, call, calls| {
            let mut sends = vec![0..0; calls.len()];
            sends[root] = 0..bytes.len();
            let offsets = match is_root {
                true => lengths(calls),
                false => vec![0; calls.len() + 1],
            };
            let into = || zeros(offsets[calls.len()]);
            let all = transport.transfer(call, &Arc::new(bytes), &sends, &parts(&offsets), into)?;
            Ok(is_root.then(|| cut(&all, &offsets)))
        })
    }
}

/// The parts of all ranks in one buffer, on every rank.
fn to_all<T: Transport, P: Pod + Send + Sync>(
    transport: &mut T,
    call: &Call,
    part: Vec<P>,
    offsets: &[usize],
    into: impl FnOnce() -> Vec<P>,
) -> Result<Vec<P>, GroupFault> {
    let sends = vec![0..part.len(); transport.world_size()];
    transport.transfer(call, &Arc::new(part), &sends, &parts(offsets), into)
}

/// The offsets of the ranks' byte strings, and the end; the calls contain the lengths.
fn lengths(calls: &[Call]) -> Vec<usize> {
    let mut offsets = vec![0];
    for call in calls {
        offsets.push(offsets[offsets.len() - 1] + call.elements as usize);
    }
    offsets
}

fn cut(all: &[u8], offsets: &[usize]) -> Vec<Vec<u8>> {
    let parts = parts(offsets).into_iter();
    parts.map(|part| all[part].to_vec()).collect()
}

fn zeros<P: Zeroable + Clone>(elements: usize) -> Vec<P> {
    vec![P::zeroed(); elements]
}

/// The memory of a buffer that other ranks have read.
fn reclaim<P: Pod>(values: Arc<Vec<P>>) -> Vec<P> {
    Arc::try_unwrap(values).unwrap_or_else(|shared| zeros(shared.len()))
}
