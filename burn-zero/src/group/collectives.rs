//! The collectives, composed of exchanges of bytes, as jobs on the communication thread call them.

use std::{
    any::Any,
    borrow::Borrow,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
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

    /// Begins a call: sends its description to all ranks, and returns those of all, in the order of ranks.
    fn announce(&mut self, call: Call, description: &[u8]) -> Result<Vec<Vec<u8>>, GroupFault>;

    /// Sends `own[sends[to]]` to each rank `to`, and gives `take` what ranks send, `lengths[from]` bytes of each, as a whole or in
    /// several chunks, at least once; of this rank itself, `own[sends[rank]]`. Empty parts are not sent.
    fn exchange(
        &mut self,
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
    rank: usize,
    world_size: usize,
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
            rank: transport.rank(),
            world_size: transport.world_size(),
            transport,
            queue,
            calls: 0,
            settings: String::new(),
            sent: Sent::default(),
            is_spread: false,
        }
    }

    /// Runs a rank's jobs until its group is dropped or lost, and then notifies the other ranks.
    pub(super) fn work(mut self, patience: Duration) {
        let worked = catch_unwind(AssertUnwindSafe(|| {
            let queue = self.queue.clone();
            while let Some((job, settings)) = queue.next(patience, || self.transport.stay()) {
                self.run(job, settings);
            }
        }));
        if let Err(panic) = worked {
            let (rank, message) = (self.rank, panic_message(&*panic));
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

    /// Makes a call. Ranks first exchange its description: data is sent only if all make the same call.
    fn make<R>(
        &mut self,
        operation: Operation,
        mut call: Call,
        run: impl FnOnce(&mut Self, &[Call]) -> Result<R, GroupFault>,
    ) -> Result<R, ZeroError> {
        if let Some(fault) = self.queue.fault() {
            return Err(fault.into());
        }
        call.begin(operation, self.calls, &self.settings);
        let own = serde_json::to_vec(&call).expect("a call is plain data");
        self.sent = Sent {
            calls: 1,
            header_bytes: (own.len() * (self.world_size - 1)) as u64,
            ..Sent::default()
        };
        let made = self.transport.announce(call, &own).and_then(|all| {
            let read = |call: &Vec<u8>| serde_json::from_slice(call);
            let calls: Result<Vec<Call>, _> = all.iter().map(read).collect();
            let calls = calls.expect("ranks run the same program");
            Call::check(self.rank, &calls)?;
            run(self, &calls)
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
        (own, size): (&Payload, usize),
        sends: &[Range<usize>],
        lengths: &[usize],
        take: Take,
    ) -> Result<(), GroupFault> {
        let all: usize = sends.iter().map(Range::len).sum();
        let sent = all - sends[self.rank].len();
        self.sent.data_bytes += sent as u64;
        self.sent.elements += (sent / size) as u64;
        self.transport.exchange(own, sends, lengths, take)
    }

    /// This rank's part of the reduction of all buffers, cut at `offsets`.
    fn reduce(
        &mut self,
        op: ReduceOp,
        buffer: Arc<HostBuffer>,
        offsets: &[usize],
    ) -> Result<HostBuffer, GroupFault> {
        let (dtype, size) = (buffer.dtype(), buffer.dtype().size_bytes());
        let sends = parts(offsets, size);
        let own = sends[self.rank].len();
        let mut out = HostBuffer::zeros(dtype, own / size);
        let lengths = vec![own; self.world_size];
        let buffer: Payload = buffer;
        self.exchange((&buffer, size), &sends, &lengths, &mut |at, parts| {
            out.reduce(at, op, parts);
        })?;
        Ok(out)
    }

    /// Puts what each rank sends at its place of `places`. `into` gives the memory, when no other rank can be reading it any more; its
    /// values are overwritten.
    fn gather(
        &mut self,
        (own, size): (Payload, usize),
        sends: &[Range<usize>],
        places: &[Range<usize>],
        into: impl FnOnce() -> HostBuffer,
    ) -> Result<HostBuffer, GroupFault> {
        let lengths: Vec<_> = places.iter().map(Range::len).collect();
        let (mut into, mut out) = (Some(into), None);
        self.exchange((&own, size), sends, &lengths, &mut |at, parts| {
            if let Some(into) = into.take() {
                out = Some(into());
            }
            let parts = places.iter().zip(parts);
            for (place, part) in parts.filter(|(_, part)| !part.is_empty()) {
                let (start, out) = (place.start + at, out.as_mut().map(AsMut::as_mut));
                out.unwrap_or_default()[start..start + part.len()].copy_from_slice(part);
            }
        })?;
        Ok(out.expect("an exchange gives parts at least once"))
    }

    /// The parts of all ranks in one buffer, on every rank.
    fn gather_parts(
        &mut self,
        part: HostBuffer,
        offsets: &[usize],
        into: impl FnOnce() -> HostBuffer,
    ) -> Result<HostBuffer, GroupFault> {
        let (bytes, size) = (part.size_bytes(), part.dtype().size_bytes());
        let sends = vec![0..bytes; self.world_size];
        let places = parts(offsets, size);
        self.gather((Arc::new(part), size), &sends, &places, into)
    }

    /// The offsets of the parts of a buffer of `elements` elements, if they `fit` it; equal parts have `equal` elements.
    fn offsets(
        &self,
        name: String,
        elements: usize,
        split: &Split,
        equal: usize,
        fit: impl FnOnce(&[usize]) -> bool,
    ) -> Result<Vec<usize>, ZeroError> {
        let offsets = split.offsets(self.world_size, equal);
        let offsets = offsets.filter(|offsets| fit(offsets));
        offsets.ok_or_else(|| ZeroError::BufferLength {
            call: name,
            elements,
            expected: format!("it is to be cut for {} ranks by {split:?}", self.world_size),
        })
    }

    fn check_root(&self, operation: Operation, label: &str, rank: usize) -> Result<(), ZeroError> {
        match rank < self.world_size {
            true => Ok(()),
            false => Err(ZeroError::NoSuchRank {
                call: format!("{operation} `{label}`"),
                rank,
                world_size: self.world_size,
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
        let (elements, dtype) = (buffer.len(), buffer.dtype());
        let offsets = balanced(elements, self.world_size);
        let call = Call::new(label, format!(" of {elements} {dtype}, {op}"));
        self.make(Operation::AllReduce, call, |ranks, _| {
            let buffer = Arc::new(buffer);
            let part = ranks.reduce(op, buffer.clone(), &offsets)?;
            ranks.gather_parts(part, &offsets, || reclaim(buffer))
        })
    }

    /// See [`ProcessGroup::reduce_scatter`](super::ProcessGroup::reduce_scatter).
    pub fn reduce_scatter(
        &mut self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
        split: impl Borrow<Split>,
    ) -> Result<HostBuffer, ZeroError> {
        let (operation, split) = (Operation::ReduceScatter, split.borrow());
        let (elements, dtype) = (buffer.len(), buffer.dtype());
        let (name, equal) = (format!("{operation} `{label}`"), elements / self.world_size);
        let fit = |offsets: &[usize]| offsets.last() == Some(&elements);
        let offsets = self.offsets(name, elements, split, equal, fit)?;
        let call = Call::new(label, format!(" of {elements} {dtype}, {op}{split}"));
        self.make(operation, call, |ranks, _| {
            ranks.reduce(op, Arc::new(buffer), &offsets)
        })
    }

    /// See [`ProcessGroup::start_all_gather`](super::ProcessGroup::start_all_gather).
    pub fn all_gather(
        &mut self,
        label: &str,
        part: HostBuffer,
        split: impl Borrow<Split>,
        into: Option<HostBuffer>,
    ) -> Result<HostBuffer, ZeroError> {
        let (operation, split) = (Operation::AllGather, split.borrow());
        let (own, dtype, rank) = (part.len(), part.dtype(), self.rank);
        let name = || format!("{operation} `{label}`");
        let fit = |offsets: &[usize]| offsets[rank + 1] - offsets[rank] == own;
        let offsets = self.offsets(name(), own, split, own, fit)?;
        let elements = offsets[self.world_size];
        if let Some(into) = into.as_ref()
            && (into.len(), into.dtype()) != (elements, dtype)
        {
            return Err(ZeroError::BufferLength {
                call: name(),
                elements: into.len(),
                expected: format!("{elements} of {dtype} are gathered into it"),
            });
        }
        let call = Call::new(label, format!(" of {elements} {dtype}{split}"));
        self.make(operation, call, |ranks, _| {
            let into = || into.unwrap_or_else(|| HostBuffer::zeros(dtype, elements));
            ranks.gather_parts(part, &offsets, into)
        })
    }

    /// A scatter and an all-gather: the root sends its buffer twice, whatever the world size.
    pub fn broadcast(
        &mut self,
        label: &str,
        root: usize,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, ZeroError> {
        self.check_root(Operation::Broadcast, label, root)?;
        let (elements, dtype) = (buffer.len(), buffer.dtype());
        let size = dtype.size_bytes();
        let offsets = balanced(elements, self.world_size);
        let own = offsets[self.rank + 1] - offsets[self.rank];
        let sends = match self.rank == root {
            true => parts(&offsets, size),
            false => vec![0..0; self.world_size],
        };
        let mut places = vec![0..0; self.world_size];
        places[root] = 0..own * size;
        let call = Call::new(label, format!(" of {elements} {dtype}, from rank {root}"));
        self.make(Operation::Broadcast, call, |ranks, _| {
            let buffer = Arc::new(buffer);
            let (whole, zeros): (Payload, _) = (buffer.clone(), || HostBuffer::zeros(dtype, own));
            let part = ranks.gather((whole, size), &sends, &places, zeros)?;
            ranks.gather_parts(part, &offsets, || reclaim(buffer))
        })
    }

    /// See [`ProcessGroup::barrier`](super::ProcessGroup::barrier).
    pub fn barrier(&mut self, label: &str) -> Result<(), ZeroError> {
        let call = Call::new(label, String::new());
        self.make(Operation::Barrier, call, |_, _| Ok(()))
    }

    /// See [`ProcessGroup::gather_bytes`](super::ProcessGroup::gather_bytes).
    pub fn gather_bytes(&mut self, label: &str, bytes: Vec<u8>) -> Result<Vec<Vec<u8>>, ZeroError> {
        let call = Call::new(label, String::new());
        let all = self.strings(Operation::GatherBytes, call, |_| true, bytes)?;
        Ok(all.unwrap_or_default())
    }

    /// See [`ProcessGroup::gather_bytes_to`](super::ProcessGroup::gather_bytes_to).
    pub fn gather_bytes_to(
        &mut self,
        label: &str,
        root: usize,
        bytes: Vec<u8>,
    ) -> Result<Option<Vec<Vec<u8>>>, ZeroError> {
        let operation = Operation::GatherBytesTo;
        self.check_root(operation, label, root)?;
        let call = Call::new(label, format!(", to rank {root}"));
        self.strings(operation, call, |rank| rank == root, bytes)
    }

    /// The byte strings of all ranks, on those that `get` them.
    fn strings(
        &mut self,
        operation: Operation,
        mut call: Call,
        get: impl Fn(usize) -> bool,
        bytes: Vec<u8>,
    ) -> Result<Option<Vec<Vec<u8>>>, ZeroError> {
        call.bytes = Some(bytes.len());
        let own = get(self.rank);
        self.make(operation, call, |ranks, calls| {
            let mut strings = own.then(|| vec![Vec::new(); calls.len()]);
            let length = |call: &Call| call.bytes.filter(|_| own).unwrap_or(0);
            let lengths: Vec<_> = calls.iter().map(length).collect();
            let send = |to| 0..if get(to) { bytes.len() } else { 0 };
            let sends: Vec<_> = (0..calls.len()).map(send).collect();
            let bytes: Payload = Arc::new(bytes);
            ranks.exchange((&bytes, 1), &sends, &lengths, &mut |_, parts| {
                for (string, part) in strings.iter_mut().flatten().zip(parts) {
                    string.extend_from_slice(part);
                }
            })?;
            Ok(strings)
        })
    }
}

/// The memory of a buffer that other ranks have read.
fn reclaim(buffer: Arc<HostBuffer>) -> HostBuffer {
    Arc::try_unwrap(buffer).unwrap_or_else(|shared| HostBuffer::zeros(shared.dtype(), shared.len()))
}
