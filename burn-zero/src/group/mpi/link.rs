//! The transport by messages: every pair of ranks exchanges its parts directly, in chunks, each awaited with a deadline.

use std::{
    collections::BTreeSet,
    ops::Range,
    sync::{Arc, mpsc::Sender},
    thread,
    time::{Duration, Instant},
};

use ::mpi::{
    datatype::Equivalence,
    request::{self, Request, Scope},
    topology::SimpleCommunicator,
    traits::{Communicator, Destination, MatchedReceiveVec, Source},
};
use bytemuck::{cast_slice, cast_slice_mut};
use serde::{Deserialize, Serialize};

use super::{GRACE, print_end};
use crate::group::{
    GroupFault, GroupOptions,
    call::Call,
    collectives::{Payload, Peers, Take, Transport},
    job::Queue,
};

/// The calls that start collectives.
const CALLS: i32 = 1;
/// Parts of buffers.
const DATA: i32 = 2;
/// [`Notice`]s.
const NOTICES: i32 = 3;

/// A call as a message: its label has at most 400 bytes and what the rank declares about 120, whose escapes have at most 6 each.
const CALL_BYTES: usize = 4096;

/// A message between ranks outside of collectives.
#[derive(Serialize, Deserialize)]
enum Notice {
    /// The rank takes part in no collective after this many.
    Left(u64),
    /// To ranks that have left: this rank has no collective to run and has not left.
    Staying,
    /// The group is lost, from this collective on.
    Lost(u64, GroupFault),
}

/// Longest text of the user's in a notice, which has to fit a message that is sent without waiting for its receiver. Labels are short.
const TEXT_BYTES: usize = 1000;

/// This process's connection to the others.
pub(super) struct Link {
    rank: usize,
    queue: Arc<Queue>,
    options: GroupOptions,
    end: Sender<()>,
    peers: Peers,
    /// When each rank gave notice of itself last, or this one began to wait for it.
    heard: Vec<Instant>,
    /// The last one that was begun.
    call: Call,
}

/// A message to a rank, or from one into the buffer of this index, until it has arrived.
type UnderWay<'a, S> = (usize, Option<usize>, Request<'a, [u8], S>);

impl Link {
    pub fn new(queue: Arc<Queue>, options: GroupOptions, end: Sender<()>) -> Self {
        let world = SimpleCommunicator::world();
        let world_size = world.size() as usize;
        Self {
            rank: world.rank() as usize,
            queue,
            options,
            end,
            peers: Peers::new(world_size),
            heard: vec![Instant::now(); world_size],
            call: Call::default(),
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.heard.len()).filter(move |&rank| rank != own)
    }

    /// Sends to and receives from other ranks at the same time, and returns how many bytes each buffer received.
    ///
    /// On a fault it does not return: MPI cannot take back buffers that it was given. The rank's calls fail with
    /// the fault, and this thread parks.
    fn swap(
        &mut self,
        tag: i32,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Vec<usize> {
        let world = SimpleCommunicator::world();
        if let Some(fault) = self.fault(std::iter::empty()) {
            self.lose(&fault);
        }
        let mut lengths = vec![0; receives.len()];
        request::scope(|scope| {
            let mut open: Vec<UnderWay<_>> = Vec::new();
            for (index, (from, into)) in receives.iter_mut().enumerate() {
                let source = world.process_at_rank(*from as i32);
                let request = source.immediate_receive_into_with_tag(scope, &mut **into, tag);
                open.push((*from, Some(index), request));
            }
            for &(to, bytes) in sends {
                let destination = world.process_at_rank(to as i32);
                let request = destination.immediate_send_with_tag(scope, bytes, tag);
                open.push((to, None, request));
            }
            let (mut since, mut polls) = (Instant::now(), 0);
            while !open.is_empty() {
                let before = open.len();
                open = test(open, |index, bytes| lengths[index] = bytes);
                if open.len() < before {
                    (since, polls) = (Instant::now(), 0);
                    continue;
                }
                let awaited = open.iter().filter(|(_, into, _)| into.is_some());
                if let Some(fault) = self.fault(awaited.map(|(from, ..)| *from)) {
                    self.lose(&fault);
                }
                if since.elapsed() > self.options.deadline {
                    let missing: BTreeSet<_> = open.iter().map(|(rank, ..)| *rank).collect();
                    let fault = GroupFault::Deadline {
                        rank: self.rank,
                        call: self.call.to_string(),
                        missing: missing.into_iter().collect(),
                        deadline: self.options.deadline,
                    };
                    self.lose(&fault);
                }
                pause(&mut polls);
            }
        });
        lengths
    }

    /// A fault found by another thread or another rank, or a rank that left before the call while this one waits for a message of it.
    fn fault(&mut self, mut awaited: impl Iterator<Item = usize>) -> Option<GroupFault> {
        self.read_notices();
        let call = &self.call;
        self.queue
            .fault()
            .or_else(|| self.peers.fault(call))
            .or_else(|| awaited.find_map(|peer| self.peers.left(call, self.rank, peer)))
    }

    /// Reads the notices that have arrived.
    fn read_notices(&mut self) {
        let world = SimpleCommunicator::world();
        let any = world.any_process();
        while let Some(probed) = any.immediate_matched_probe_with_tag(NOTICES) {
            let (bytes, status) = probed.matched_receive_vec::<u8>();
            let from = status.source_rank() as usize;
            self.heard[from] = Instant::now();
            match serde_json::from_slice(&bytes).expect("ranks run the same program") {
                Notice::Left(calls) => self.peers.left[from] = Some(calls),
                Notice::Staying => {}
                Notice::Lost(sequence, fault) => self.peers.lose(sequence, &fault),
            }
        }
    }

    /// Sends a notice to other ranks. It is small, so that MPI takes it at once, whatever its receiver does.
    fn notify(&self, to: impl Iterator<Item = usize>, notice: &Notice) {
        let world = SimpleCommunicator::world();
        let bytes = serde_json::to_vec(notice).expect("a notice is plain data");
        request::scope(|scope| {
            let send = |to| {
                let destination = world.process_at_rank(to as i32);
                let request = destination.immediate_send_with_tag(scope, &bytes[..], NOTICES);
                (to, None, request)
            };
            let mut open: Vec<_> = to.map(send).collect();
            let (since, mut polls) = (Instant::now(), 0);
            while !open.is_empty() {
                open = test(open, |_, _| {});
                if since.elapsed() > self.options.deadline {
                    self.end_job("cannot notify the other ranks");
                }
                pause(&mut polls);
            }
        });
    }

    /// Ends all processes of the job, with the reason on stderr.
    fn end_job(&self, reason: &str) -> ! {
        eprintln!("rank {} {reason}; the job ends", self.rank);
        SimpleCommunicator::world().abort(1)
    }

    fn lose(&mut self, fault: &GroupFault) -> ! {
        self.queue.fail(fault.clone());
        self.spread(self.call.sequence, fault);
        self.park()
    }

    /// Waits for the end of the process, with the group lost. MPI is not finalized: that would wait for other ranks.
    fn park(&self) -> ! {
        let _ = self.end.send(());
        loop {
            thread::park();
        }
    }

    /// The ranks that have not left.
    fn staying(&self) -> Vec<usize> {
        let left = &self.peers.left;
        self.others().filter(|&rank| left[rank].is_none()).collect()
    }
}

impl Drop for Link {
    /// Does not return if the group is lost, so that MPI is not finalized.
    fn drop(&mut self) {
        if self.queue.fault().is_some() {
            self.park();
        }
    }
}

impl Transport for Link {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.heard.len()
    }

    fn announce(&mut self, call: Call, description: &[u8]) -> Result<Vec<Vec<u8>>, GroupFault> {
        self.call = call;
        let sends: Vec<_> = self.others().map(|to| (to, description)).collect();
        let mut all = vec![vec![0; CALL_BYTES]; self.world_size()];
        all[self.rank] = description.to_vec();
        let into = all.iter_mut().map(|into| &mut into[..]).enumerate();
        let mut receives: Vec<_> = into.filter(|(from, _)| *from != self.rank).collect();
        let lengths = self.swap(CALLS, &sends, &mut receives);
        for (from, length) in self.others().zip(lengths) {
            all[from].truncate(length);
        }
        Ok(all)
    }

    fn exchange(
        &mut self,
        own: &Payload,
        sends: &[Range<usize>],
        lengths: &[usize],
        take: Take,
    ) -> Result<(), GroupFault> {
        let (rank, own) = (self.rank, (**own).as_ref());
        let size = self.options.chunk_elements * size_of::<f32>();
        let received = lengths.iter().copied().max().unwrap_or(0);
        let longest = sends.iter().map(Range::len).fold(received, usize::max);
        // Of f32, so that the bytes are aligned for elements of all types.
        let mut staging = vec![vec![0_f32; received.min(size).div_ceil(4)]; sends.len()];
        for at in (0..longest.max(1)).step_by(size) {
            let chunk = |part: Range<usize>| {
                let start = part.end.min(part.start + at);
                start..part.end.min(start + size)
            };
            let out = self.others().map(|to| (to, &own[chunk(sends[to].clone())]));
            let out: Vec<_> = out.filter(|(_, bytes)| !bytes.is_empty()).collect();
            let mut into: Vec<(usize, &mut [u8])> = Vec::new();
            for (from, staged) in staging.iter_mut().enumerate() {
                let length = chunk(0..lengths[from]).len();
                if from != rank && length > 0 {
                    into.push((from, &mut cast_slice_mut(staged)[..length]));
                }
            }
            self.swap(DATA, &out, &mut into);
            let part = |from: usize| match from == rank {
                true => &own[chunk(sends[from].clone())],
                false => &cast_slice(&staging[from])[..chunk(0..lengths[from]).len()],
            };
            let parts: Vec<&[u8]> = (0..sends.len()).map(part).collect();
            if at == 0 || parts.iter().any(|part| !part.is_empty()) {
                take(at, &parts);
            }
        }
        Ok(())
    }

    /// A process may work without collectives for as long as it likes.
    fn stay(&mut self) {
        self.read_notices();
        let left = &self.peers.left;
        let waiting = self.others().filter(|&rank| left[rank].is_some());
        self.notify(waiting, &Notice::Staying);
    }

    /// Ends the job if this rank panicked or gave up.
    fn spread(&mut self, sequence: u64, fault: &GroupFault) {
        let mut fault = fault.clone();
        if let GroupFault::Aborted { rank, reason: text }
        | GroupFault::PeerPanicked {
            rank,
            message: text,
        } = &mut fault
        {
            if *rank == self.rank {
                print_end(&fault);
                SimpleCommunicator::world().abort(1)
            }
            if text.len() > TEXT_BYTES {
                text.truncate(text.floor_char_boundary(TEXT_BYTES));
                text.push_str(" ...");
            }
        }
        self.notify(self.others(), &Notice::Lost(sequence, fault));
    }

    /// Waits until all ranks have left, so that finalizing MPI does not wait; or until one gives no notice of itself for the
    /// deadline, or stays for longer than it may.
    fn leave(&mut self, calls: u64) {
        self.notify(self.others(), &Notice::Left(calls));
        self.heard.fill(Instant::now());
        let (since, mut polls) = (Instant::now(), 0);
        while !self.staying().is_empty() {
            self.read_notices();
            if let Some((_, fault)) = self.peers.lost.take() {
                eprintln!("rank {} has left its group: {fault}", self.rank);
                self.queue.fail(fault);
                // This process may be about to exit with success: processes that failed shall exit before it.
                thread::sleep(GRACE);
                self.park();
            }
            let (deadline, mut missing) = (self.options.deadline, self.staying());
            if let Some(longest) = self.options.longest_stay
                && since.elapsed() > longest
            {
                self.end_job(&format!(
                    "has left its group, and ranks {missing:?} have stayed for {longest:?} since"
                ));
            }
            missing.retain(|&rank| self.heard[rank].elapsed() > deadline);
            if !missing.is_empty() {
                self.end_job(&format!(
                    "has left its group and heard nothing of ranks {missing:?} for {deadline:?}"
                ));
            }
            pause(&mut polls);
        }
    }
}

/// Tests all messages, and returns those that have not arrived. Calls `received` with the index and the length of those that have.
fn test<'a, S: Scope<'a>>(
    messages: Vec<UnderWay<'a, S>>,
    mut received: impl FnMut(usize, usize),
) -> Vec<UnderWay<'a, S>> {
    let open = |(rank, index, request): UnderWay<'a, S>| match request.test() {
        Err(request) => Some((rank, index, request)),
        Ok(status) => {
            if let Some(index) = index {
                received(index, status.count(u8::equivalent_datatype()) as usize);
            }
            None
        }
    };
    messages.into_iter().filter_map(open).collect()
}

/// Pauses between polls for messages: at first none, for latency, about 10 us long; then longer and longer ones, so that a rank that
/// waits for long frees its core for threads that compute.
fn pause(polls: &mut u32) {
    *polls = polls.saturating_add(1);
    match *polls {
        0..=50 => std::hint::spin_loop(),
        51..=500 => thread::yield_now(),
        501..=1000 => thread::sleep(Duration::from_micros(50)),
        _ => thread::sleep(Duration::from_micros(500)),
    }
}
