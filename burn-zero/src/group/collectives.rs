//! The collectives, composed of exchanges of bytes, as jobs on the communication thread call them.

use std::{
    any::Any,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use super::{
    GroupFault, HostBuffer, Operation, ReduceOp, Split,
    call::{Call, Sent, balanced, parts},
    job::{Job, Queue},
};
use crate::ZeroError;

/// What a rank sends parts of: shared, so that ranks that are threads read it without a copy.
pub(super) type Payload = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Receives the next bytes of all ranks' parts: their offset in the parts, and the bytes by rank.
pub(super) type Take<'a> = &'a mut dyn FnMut(usize, &[&[u8]]);

/// Moves bytes between this rank and the others. Waits for each of them at most for the deadline, and returns their faults.
pub(super) trait Transport: Send {
    fn rank(&self) -> usize;

    fn world_size(&self) -> usize;

    /// Sends a message to all ranks and returns those of all, in the order of ranks.
    fn announce(&mut self, call: &Call, message: &[u8]) -> Result<Vec<Vec<u8>>, GroupFault>;

    /// Sends `own[sends[to]]` to each rank `to`, and gives `take` what ranks send, `lengths[from]` bytes of each, as a whole or in
    /// several chunks, at least once; of this rank itself, `own[sends[rank]]`. Empty parts are not sent.
    fn exchange(
        &mut self,
        call: &Call,
        own: &Payload,
        sends: &[Range<usize>],
        lengths: &[usize],
        take: Take,
    ) -> Result<(), GroupFault>;

    /// Tells ranks that have left that this one is alive. Called while there is no job.
    fn stay(&mut self) {}

    /// Tells all other ranks that the group is lost, from the collective `sequence` of this rank on.
    fn spread(&mut self, sequence: u64, fault: &GroupFault);

    /// Tells all other ranks that this one takes part in no collective after `calls` of them.
    fn leave(&mut self, calls: u64);
}

/// What a transport knows of the other ranks.
#[derive(Default)]
pub(super) struct Peers {
    /// Collectives in which each rank that has left took part.
    pub left: Vec<Option<u64>>,
    /// The fault with the earliest collective, and that collective: it and all later ones fail. Earlier ones may still complete.
    pub lost: Option<(u64, GroupFault)>,
}

impl Peers {
    pub fn new(world_size: usize) -> Self {
        let (left, lost) = (vec![None; world_size], None);
        Self { left, lost }
    }

    pub fn lose(&mut self, sequence: u64, fault: &GroupFault) {
        if self
            .lost
            .as_ref()
            .is_none_or(|(first, _)| sequence < *first)
        {
            self.lost = Some((sequence, fault.clone()));
        }
    }

    /// The fault of a collective, if it has failed.
    pub fn fault(&self, call: &Call) -> Option<GroupFault> {
        let lost = self.lost.as_ref();
        let lost = lost.filter(|(sequence, _)| *sequence <= call.sequence);
        lost.map(|(_, fault)| fault.clone())
    }

    /// The fault if `peer`, for whose message `rank` waits in a collective, has left before it.
    pub fn left(&self, call: &Call, rank: usize, peer: usize) -> Option<GroupFault> {
        let calls = self.left[peer].filter(|&calls| calls <= call.sequence)?;
        let call = call.to_string();
        Some(GroupFault::PeerLeft {
            rank,
            call,
            peer,
            calls,
        })
    }
}

/// A rank's collectives, for jobs on its communication thread: see the methods of the same names of
/// [`ProcessGroup`](super::ProcessGroup).
pub struct Collectives {
    transport: Box<dyn Transport>,
    queue: Arc<Queue>,
    /// Collectives so far.
    calls: u64,
    /// What the rank had declared when the running job was submitted.
    settings: String,
    /// What the collective under way has sent.
    sent: Sent,
    /// Whether the other ranks know that the group is lost.
    is_spread: bool,
}

/// The message of a caught panic.
pub(super) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

impl Collectives {
    pub(super) fn new(transport: Box<dyn Transport>, queue: Arc<Queue>) -> Self {
        Self {
            transport,
            queue,
            calls: 0,
            settings: String::new(),
            sent: Sent::default(),
            is_spread: false,
        }
    }

    /// Runs a rank's jobs until its group is dropped or lost, and then notifies the other ranks.
    pub(super) fn work(mut self, patience: std::time::Duration) {
        let worked = catch_unwind(AssertUnwindSafe(|| {
            let queue = self.queue.clone();
            while let Some((job, settings)) = queue.next(patience, || self.transport.stay()) {
                self.run(job, settings);
            }
        }));
        if let Err(panic) = worked {
            let (rank, message) = (self.transport.rank(), panic_message(&*panic));
            self.lose(GroupFault::PeerPanicked { rank, message });
        }
        match self.queue.fault() {
            None => self.transport.leave(self.calls),
            Some(fault) => self.lose(fault),
        }
    }

    pub(super) fn run(&mut self, job: Job, settings: String) {
        self.settings = settings;
        job.run(self);
    }

    fn lose(&mut self, fault: GroupFault) {
        if !std::mem::replace(&mut self.is_spread, true) {
            self.transport.spread(self.calls, &fault);
        }
        self.queue.fail(fault);
    }

    fn call(&self, operation: Operation, label: &str) -> Call {
        Call::new(operation, self.calls, label)
    }

    /// Makes a call. Ranks first exchange its description: data is sent only if all make the same call.
    fn make<R>(
        &mut self,
        operation: Operation,
        call: Call,
        run: impl FnOnce(&mut Self, &Call, &[Call]) -> Result<R, GroupFault>,
    ) -> Result<R, ZeroError> {
        if let Some(fault) = self.queue.fault() {
            return Err(fault.into());
        }
        let call = match &*self.settings {
            "" => call,
            settings => call.with(format_args!(", in `{settings}`")),
        };
        let (rank, ranks) = (self.transport.rank(), self.transport.world_size());
        let message = serde_json::to_vec(&call).expect("a call is plain data");
        self.sent = Sent {
            calls: 1,
            header_bytes: (message.len() * (ranks - 1)) as u64,
            ..Sent::default()
        };
        let made = self.transport.announce(&call, &message).and_then(|all| {
            let read = |message: &Vec<u8>| serde_json::from_slice(message);
            let calls: Result<Vec<Call>, _> = all.iter().map(read).collect();
            let calls = calls.expect("ranks run the same program");
            call.check(rank, &calls)?;
            run(self, &call, &calls)
        });
        match made {
            Ok(output) => {
                self.calls += 1;
                self.queue.traffic.lock().record(operation, self.sent);
                Ok(output)
            }
            Err(fault) => {
                self.lose(fault.clone());
                Err(fault.into())
            }
        }
    }

    /// [`Transport::exchange`], counted; `size` is that of an element in bytes.
    fn exchange(
        &mut self,
        call: &Call,
        own: &Payload,
        size: usize,
        sends: &[Range<usize>],
        lengths: &[usize],
        take: Take,
    ) -> Result<(), GroupFault> {
        let all: usize = sends.iter().map(Range::len).sum();
        let sent = all - sends[self.transport.rank()].len();
        self.sent.data_bytes += sent as u64;
        self.sent.elements += (sent / size) as u64;
        self.transport.exchange(call, own, sends, lengths, take)
    }

    /// This rank's part of the reduction of all buffers, cut at `offsets`.
    fn reduce(
        &mut self,
        call: &Call,
        op: ReduceOp,
        buffer: Arc<HostBuffer>,
        offsets: &[usize],
    ) -> Result<HostBuffer, GroupFault> {
        let (rank, size) = (self.transport.rank(), buffer.dtype().size_bytes());
        let sends = parts(offsets, size);
        let own = sends[rank].len();
        let mut out = HostBuffer::zeros(buffer.dtype(), own / size);
        let lengths = vec![own; sends.len()];
        let buffer: Payload = buffer;
        self.exchange(call, &buffer, size, &sends, &lengths, &mut |at, parts| {
            out.reduce(at, op, parts);
        })?;
        Ok(out)
    }

    /// Puts what each rank sends at its place of `places`. `into` gives the memory, when no other rank can be reading it any more; its
    /// values are overwritten.
    fn gather<M: AsMut<[u8]>>(
        &mut self,
        call: &Call,
        (own, size): (Payload, usize),
        sends: &[Range<usize>],
        places: &[Range<usize>],
        into: impl FnOnce() -> M,
    ) -> Result<M, GroupFault> {
        let lengths: Vec<_> = places.iter().map(Range::len).collect();
        let (mut into, mut out) = (Some(into), None);
        self.exchange(call, &own, size, sends, &lengths, &mut |at, parts| {
            if let Some(into) = into.take() {
                out = Some(into());
            }
            let Some(out) = &mut out else { return };
            let parts = places.iter().zip(parts);
            for (place, part) in parts.filter(|(_, part)| !part.is_empty()) {
                let start = place.start + at;
                out.as_mut()[start..start + part.len()].copy_from_slice(part);
            }
        })?;
        Ok(out.expect("an exchange gives parts at least once"))
    }

    /// The parts of all ranks in one buffer, on every rank.
    fn gather_parts(
        &mut self,
        call: &Call,
        part: HostBuffer,
        offsets: &[usize],
        into: impl FnOnce() -> HostBuffer,
    ) -> Result<HostBuffer, GroupFault> {
        let size = part.dtype().size_bytes();
        let sends = vec![0..part.size_bytes(); offsets.len() - 1];
        let places = parts(offsets, size);
        self.gather(call, (Arc::new(part), size), &sends, &places, into)
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

    /// A reduce-scatter, so that every element is added and rounded by one rank, and an all-gather.
    pub fn all_reduce(
        &mut self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError> {
        let operation = Operation::AllReduce;
        let call = self.call(operation, label).of(buffer.len(), &buffer);
        let offsets = balanced(buffer.len(), self.transport.world_size());
        self.make(
            operation,
            call.with(format_args!(", {op}")),
            |ranks, call, _| {
                let buffer = Arc::new(buffer);
                let part = ranks.reduce(call, op, buffer.clone(), &offsets)?;
                ranks.gather_parts(call, part, &offsets, || reclaim(buffer))
            },
        )
    }

    /// See [`ProcessGroup::reduce_scatter`](super::ProcessGroup::reduce_scatter).
    pub fn reduce_scatter(
        &mut self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
        split: &Split,
    ) -> Result<HostBuffer, ZeroError> {
        let (operation, ranks) = (Operation::ReduceScatter, self.transport.world_size());
        let offsets = split.offsets(ranks, buffer.len() / ranks);
        let offsets = offsets
            .filter(|offsets| offsets[ranks] == buffer.len())
            .ok_or_else(|| cannot_cut(operation, label, buffer.len(), split, ranks))?;
        let call = self.call(operation, label).of(buffer.len(), &buffer);
        let call = call.with(format_args!(", {op}{}", split.describe()));
        self.make(operation, call, |ranks, call, _| {
            ranks.reduce(call, op, Arc::new(buffer), &offsets)
        })
    }

    /// See [`ProcessGroup::start_all_gather`](super::ProcessGroup::start_all_gather).
    pub fn all_gather(
        &mut self,
        label: &str,
        part: HostBuffer,
        split: &Split,
        into: Option<HostBuffer>,
    ) -> Result<HostBuffer, ZeroError> {
        let (operation, ranks) = (Operation::AllGather, self.transport.world_size());
        let rank = self.transport.rank();
        let own = |offsets: &Vec<usize>| offsets[rank + 1] - offsets[rank] == part.len();
        let offsets = split.offsets(ranks, part.len()).filter(own);
        let offsets =
            offsets.ok_or_else(|| cannot_cut(operation, label, part.len(), split, ranks))?;
        let (elements, dtype) = (offsets[ranks], part.dtype());
        if let Some(into) = into.as_ref()
            && (into.len(), into.dtype()) != (elements, dtype)
        {
            return Err(ZeroError::BufferLength {
                call: format!("{operation} `{label}`"),
                elements: into.len(),
                expected: format!("{elements} of {dtype} are gathered into it"),
            });
        }
        let call = self.call(operation, label).of(elements, &part);
        let call = call.with(format_args!("{}", split.describe()));
        self.make(operation, call, |ranks, call, _| {
            let into = || into.unwrap_or_else(|| HostBuffer::zeros(dtype, elements));
            ranks.gather_parts(call, part, &offsets, into)
        })
    }

    /// A scatter and an all-gather: the root sends its buffer twice, whatever the world size.
    pub fn broadcast(
        &mut self,
        label: &str,
        root: usize,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError> {
        let operation = Operation::Broadcast;
        let call = self.call(operation, label).of(buffer.len(), &buffer);
        let call = call.with(format_args!(", from rank {root}"));
        self.check_root(&call, root)?;
        let (rank, world_size) = (self.transport.rank(), self.transport.world_size());
        let (dtype, size) = (buffer.dtype(), buffer.dtype().size_bytes());
        let offsets = balanced(buffer.len(), world_size);
        let own = offsets[rank + 1] - offsets[rank];
        let sends = match rank == root {
            true => parts(&offsets, size),
            false => vec![0..0; world_size],
        };
        let mut places = vec![0..0; world_size];
        places[root] = 0..own * size;
        self.make(operation, call, |ranks, call, _| {
            let buffer = Arc::new(buffer);
            let scattered = (buffer.clone() as Payload, size);
            let part = ranks.gather(call, scattered, &sends, &places, || {
                HostBuffer::zeros(dtype, own)
            })?;
            ranks.gather_parts(call, part, &offsets, || reclaim(buffer))
        })
    }

    /// See [`ProcessGroup::barrier`](super::ProcessGroup::barrier).
    pub fn barrier(&mut self, label: &str) -> Result<(), ZeroError> {
        let operation = Operation::Barrier;
        self.make(operation, self.call(operation, label), |_, _, _| Ok(()))
    }

    /// See [`ProcessGroup::gather_bytes`](super::ProcessGroup::gather_bytes).
    pub fn gather_bytes(&mut self, label: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, ZeroError> {
        let call = self.call(Operation::GatherBytes, label);
        let all = self.strings(Operation::GatherBytes, call, None, bytes)?;
        Ok(all.unwrap_or_default())
    }

    /// See [`ProcessGroup::gather_bytes_to`](super::ProcessGroup::gather_bytes_to).
    pub fn gather_bytes_to(
        &mut self,
        label: &str,
        root: usize,
        bytes: Vec<u8>,
    ) -> Result<Option<Vec<Vec<u8>>>, ZeroError> {
        let call = self.call(Operation::GatherBytesTo, label);
        let call = call.with(format_args!(", to rank {root}"));
        self.check_root(&call, root)?;
        self.strings(Operation::GatherBytesTo, call, Some(root), bytes)
    }

    /// The byte strings of all ranks, on the root or everywhere.
    fn strings(
        &mut self,
        operation: Operation,
        mut call: Call,
        root: Option<usize>,
        bytes: Vec<u8>,
    ) -> Result<Option<Vec<Vec<u8>>>, ZeroError> {
        call.bytes = Some(bytes.len() as u64);
        let gets = |rank| root.is_none_or(|root| root == rank);
        self.make(operation, call, |ranks, call, calls| {
            let rank = ranks.transport.rank();
            let mut strings = gets(rank).then(|| vec![Vec::new(); calls.len()]);
            let length = |call: &Call| call.bytes.filter(|_| gets(rank)).unwrap_or(0) as usize;
            let lengths: Vec<_> = calls.iter().map(length).collect();
            let send = |to| 0..if gets(to) { bytes.len() } else { 0 };
            let sends: Vec<_> = (0..calls.len()).map(send).collect();
            let own: Payload = Arc::new(bytes);
            ranks.exchange(call, &own, 1, &sends, &lengths, &mut |_, parts| {
                for (string, part) in strings.iter_mut().flatten().zip(parts) {
                    string.extend_from_slice(part);
                }
            })?;
            Ok(strings)
        })
    }
}

fn cannot_cut(
    operation: Operation,
    label: &str,
    elements: usize,
    split: &Split,
    world_size: usize,
) -> ZeroError {
    ZeroError::BufferLength {
        call: format!("{operation} `{label}`"),
        elements,
        expected: format!("it is to be cut for {world_size} ranks by {split:?}"),
    }
}

/// The memory of a buffer that other ranks have read.
fn reclaim(buffer: Arc<HostBuffer>) -> HostBuffer {
    Arc::try_unwrap(buffer).unwrap_or_else(|shared| HostBuffer::zeros(shared.dtype(), shared.len()))
}
