//! The collectives, as jobs on the communication thread call them.

use std::{
    any::Any,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use super::{
    Buffer, BufferDtype, Collective, GroupFault, HostBuffer, Operation, ReduceOp, Split, Transfer,
    buffer::widen,
    call::{CALL_BYTES, Call, Sent},
    part::{Part, Payload},
    queue::Queue,
    transport::{Exchange, Transport},
};
use crate::{BufferLength, InvalidSetting, RanksError};

/// What [`Collectives::all_gather_parts`] brings of each rank, where it is: in the sender's memory,
/// or where a message was received.
pub struct GatheredParts {
    dtype: BufferDtype,
    by_rank: Vec<Part>,
}

impl GatheredParts {
    /// Copies elements of a rank's part, widened exactly.
    pub fn read(&self, rank: usize, elements: Range<usize>, to: &mut [f32]) {
        let size = self.dtype.size_bytes();
        let bytes = elements.start * size..elements.end * size;
        widen(self.dtype, &self.by_rank[rank].bytes()[bytes], to);
    }
}

/// Work that makes collectives: made by [`Pending::start`](super::Pending::start), given to
/// [`ProcessGroup::submit`](super::ProcessGroup::submit).
pub struct Job(pub(super) Box<dyn FnOnce(&mut Collectives) + Send>);

/// A rank's collectives, for jobs on its communication thread: see the methods of the same names of
/// [`ProcessGroup`](super::ProcessGroup).
pub struct Collectives {
    transport: Box<dyn Transport>,
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) queue: Arc<Queue<Job>>,
    /// Collectives so far.
    calls: u64,
    /// The collective under way, and what it has sent.
    call: Call,
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
    pub(super) fn new(transport: Box<dyn Transport>, queue: Arc<Queue<Job>>) -> Self {
        Self {
            transport,
            rank: queue.rank,
            world_size: queue.world_size,
            queue,
            calls: 0,
            call: Call::default(),
            sent: Sent::default(),
            is_spread: false,
        }
    }

    /// Runs a rank's jobs until its group is dropped or lost, and then notifies the other ranks.
    pub(super) fn work(mut self) {
        let worked = catch_unwind(AssertUnwindSafe(|| {
            let queue = self.queue.clone();
            while let Some(Job(work)) = queue.next() {
                work(&mut self);
            }
        }));
        if let Err(panic) = worked {
            let (rank, message) = (self.rank, panic_message(&*panic));
            self.lose(&GroupFault::PeerPanicked { rank, message });
        }
        match self.queue.fault() {
            None => self.transport.leave(self.calls),
            Some(fault) => self.lose(&fault),
        }
    }

    fn lose(&mut self, fault: &GroupFault) {
        if !std::mem::replace(&mut self.is_spread, true) {
            self.transport.spread(self.calls, fault);
        }
        self.queue.fail(fault);
    }

    /// Makes a call. Ranks first exchange descriptions of their calls, which `run` gets: data is
    /// sent only if all make the same call.
    fn make<R>(
        &mut self,
        operation: Operation,
        label: &str,
        details: String,
        bytes: Option<usize>,
        run: impl FnOnce(&mut Self, &[Call]) -> Result<R, GroupFault>,
    ) -> Result<R, RanksError> {
        if let Some(fault) = self.queue.fault() {
            return Err(fault.into());
        }
        self.call = Call::new(operation, self.calls, label, details, bytes);
        self.sent = Sent {
            calls: 1,
            header_bytes: (CALL_BYTES * (self.world_size - 1)) as u64,
            ..Sent::default()
        };
        match self.agree().and_then(|calls| run(self, &calls)) {
            Ok(output) => {
                self.calls += 1;
                self.queue.traffic.lock().record(operation, self.sent);
                Ok(output)
            }
            Err(fault) => {
                self.lose(&fault);
                Err(fault.into())
            }
        }
    }

    /// The calls of all ranks, equal but for the lengths of byte strings.
    fn agree(&mut self) -> Result<Vec<Call>, GroupFault> {
        let ranks = self.world_size;
        let own: Payload = Arc::new(self.call.to_message());
        let all = self.transport.exchange(Exchange {
            call: &self.call,
            own: &own,
            sends: &vec![0..CALL_BYTES; ranks],
            lengths: &vec![CALL_BYTES; ranks],
        })?;
        Call::read_all(self.rank, &all)
    }

    /// Counts elements of this size, which the collective under way sends to other ranks.
    pub(super) fn count(&mut self, elements: usize, size: usize) {
        self.sent.data_bytes += (elements * size) as u64;
        self.sent.elements += elements as u64;
    }

    /// [`Transport::exchange`], counted in `sent`; `size` is the size of an element in bytes.
    pub(super) fn exchange(
        &mut self,
        own: Payload,
        size: usize,
        sends: &[Range<usize>],
        lengths: &[usize],
    ) -> Result<Vec<Part>, GroupFault> {
        let all: usize = sends.iter().map(Range::len).sum();
        let sent = all - sends[self.rank].len();
        self.count(sent / size, size);
        self.transport.exchange(Exchange {
            call: &self.call,
            own: &own,
            sends,
            lengths,
        })
    }

    /// The offsets of the ranks' parts. `elements` is the length of the whole buffer if `are_all`,
    /// else that of this rank's part.
    fn offsets(
        &self,
        (operation, label): (Operation, &str),
        split: &Split,
        elements: usize,
        are_all: bool,
    ) -> Result<Vec<usize>, BufferLength> {
        let ranks = self.world_size;
        let (part, equal) = match are_all {
            true => (0..ranks, elements / ranks),
            false => (self.rank..self.rank + 1, elements),
        };
        let offsets = split.offsets(ranks, equal);
        let fits = |offsets: &Vec<usize>| offsets[part.end] - offsets[part.start] == elements;
        offsets.filter(fits).ok_or_else(|| BufferLength {
            call: format!("{operation} `{label}`"),
            elements,
            expected: format!("it is to be cut for {ranks} ranks by {split:?}"),
        })
    }

    fn check_root(&self, root: usize) -> Result<(), InvalidSetting> {
        InvalidSetting::unless(root < self.world_size, "root", root, "a rank of the group")
    }

    /// A collective on a buffer in any memory.
    pub fn run<T: Buffer>(
        &mut self,
        label: &str,
        collective: Collective,
        buffer: T,
    ) -> Result<T, RanksError> {
        let (elements, dtype) = (buffer.elements(), buffer.dtype());
        match collective {
            Collective::AllReduce(op) => {
                let details = format!(" of {elements} {dtype}, {op}");
                self.make(Operation::AllReduce, label, details, None, |ranks, _| {
                    buffer.all_reduce(op, &mut Transfer(ranks))
                })
            }
            Collective::ReduceScatter(op, split) => {
                let operation = Operation::ReduceScatter;
                let offsets = self.offsets((operation, label), &split, elements, true)?;
                let details = format!(" of {elements} {dtype}, {op}{split}");
                self.make(operation, label, details, None, |ranks, _| {
                    buffer.reduce_scatter(op, &offsets, &mut Transfer(ranks))
                })
            }
            Collective::AllGather(split) => self.gather(label, buffer, &split, T::all_gather),
            Collective::Broadcast { root } => {
                self.check_root(root)?;
                let details = format!(" of {elements} {dtype}, from rank {root}");
                self.make(Operation::Broadcast, label, details, None, |ranks, _| {
                    buffer.broadcast(root, &mut Transfer(ranks))
                })
            }
        }
    }

    fn gather<T: Buffer, R>(
        &mut self,
        label: &str,
        part: T,
        split: &Split,
        run: impl FnOnce(T, &[usize], &mut Transfer<'_>) -> Result<R, GroupFault>,
    ) -> Result<R, RanksError> {
        let (operation, dtype) = (Operation::AllGather, part.dtype());
        let offsets = self.offsets((operation, label), split, part.elements(), false)?;
        let details = format!(" of {} {dtype}{split}", offsets[self.world_size]);
        self.make(operation, label, details, None, |ranks, _| {
            run(part, &offsets, &mut Transfer(ranks))
        })
    }

    /// See [`ProcessGroup::all_reduce`](super::ProcessGroup::all_reduce).
    pub fn all_reduce(
        &mut self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, RanksError> {
        self.run(label, Collective::AllReduce(op), buffer)
    }

    /// See [`ProcessGroup::reduce_scatter`](super::ProcessGroup::reduce_scatter).
    pub fn reduce_scatter(
        &mut self,
        label: &str,
        op: ReduceOp,
        buffer: HostBuffer,
        split: Split,
    ) -> Result<HostBuffer, RanksError> {
        self.run(label, Collective::ReduceScatter(op, split), buffer)
    }

    /// See [`ProcessGroup::all_gather`](super::ProcessGroup::all_gather).
    pub fn all_gather(
        &mut self,
        label: &str,
        part: HostBuffer,
        split: Split,
    ) -> Result<HostBuffer, RanksError> {
        self.run(label, Collective::AllGather(split), part)
    }

    /// [`all_gather`](Self::all_gather) for those who copy each element elsewhere: without memory
    /// for all of them, and without a copy into it.
    pub fn all_gather_parts(
        &mut self,
        label: &str,
        part: HostBuffer,
        split: Split,
    ) -> Result<GatheredParts, RanksError> {
        self.gather(label, part, &split, |part, offsets, transfer| {
            let dtype = part.dtype();
            let by_rank = transfer.gather(part, offsets)?;
            Ok(GatheredParts { dtype, by_rank })
        })
    }

    /// See [`ProcessGroup::broadcast`](super::ProcessGroup::broadcast).
    pub fn broadcast(
        &mut self,
        label: &str,
        root: usize,
        buffer: HostBuffer,
    ) -> Result<HostBuffer, RanksError> {
        self.run(label, Collective::Broadcast { root }, buffer)
    }

    /// See [`ProcessGroup::barrier`](super::ProcessGroup::barrier).
    pub fn barrier(&mut self, label: &str) -> Result<(), RanksError> {
        self.make(
            Operation::Barrier,
            label,
            String::new(),
            None,
            |_, _| Ok(()),
        )
    }

    /// See [`ProcessGroup::gather_bytes`](super::ProcessGroup::gather_bytes).
    pub fn gather_bytes(
        &mut self,
        label: &str,
        bytes: Vec<u8>,
    ) -> Result<Vec<Vec<u8>>, RanksError> {
        let all = self.strings(Operation::GatherBytes, label, None, bytes)?;
        Ok(all.unwrap_or_default())
    }

    /// See [`ProcessGroup::gather_bytes_to`](super::ProcessGroup::gather_bytes_to).
    pub fn gather_bytes_to(
        &mut self,
        label: &str,
        root: usize,
        bytes: Vec<u8>,
    ) -> Result<Option<Vec<Vec<u8>>>, RanksError> {
        self.check_root(root)?;
        self.strings(Operation::GatherBytesTo, label, Some(root), bytes)
    }

    /// The byte strings of all ranks, on the root, or on all if there is none.
    fn strings(
        &mut self,
        operation: Operation,
        label: &str,
        root: Option<usize>,
        bytes: Vec<u8>,
    ) -> Result<Option<Vec<Vec<u8>>>, RanksError> {
        let gets = |rank: usize| root.is_none_or(|root| root == rank);
        let (ranks, own) = (self.world_size, gets(self.rank));
        let details = root.map_or(String::new(), |root| format!(", to rank {root}"));
        let length = bytes.len();
        self.make(operation, label, details, Some(length), |this, calls| {
            let length_of = |call: &Call| call.bytes.filter(|_| own).unwrap_or(0);
            let lengths: Vec<_> = calls.iter().map(length_of).collect();
            let sends = (0..ranks).map(|to| 0..if gets(to) { length } else { 0 });
            let all = this.exchange(Arc::new(bytes), 1, &sends.collect::<Vec<_>>(), &lengths)?;
            let strings = || all.iter().map(|part| part.bytes().to_vec()).collect();
            Ok(own.then(strings))
        })
    }
}
