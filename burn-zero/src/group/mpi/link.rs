//! The transport by messages: every pair of ranks exchanges its parts directly, in chunks, each awaited with a deadline.

use std::{
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
        call: &Call,
        tag: i32,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Vec<usize> {
        let world = SimpleCommunicator::world();
        if let Some(fault) = self.fault(call, std::iter::empty()) {
            self.lose(call, &fault);
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
            let mut wait = Wait::default();
            while !open.is_empty() {
                let before = open.len();
                open = test(open, |index, bytes| lengths[index] = bytes);
                if open.len() < before {
                    wait = Wait::default();
                    continue;
                }
                let awaited = open
                    .iter()
                    .filter_map(|(from, index, _)| index.map(|_| *from));
                let fault = self.fault(call, awaited).or_else(|| {
                    (wait.since.elapsed() > self.options.deadline).then(|| {
                        let mut missing: Vec<_> = open.iter().map(|(rank, ..)| *rank).collect();
                        missing.sort_unstable();
                        missing.dedup();
                        GroupFault::Deadline {
                            rank: self.rank,
                            call: call.to_string(),
                            missing,
                            deadline: self.options.deadline,
                        }
                    })
                });
                if let Some(fault) = fault {
                    self.lose(call, &fault);
                }
                wait.pause();
            }
        });
        lengths
    }

    /// A fault found by another thread or another rank, or a rank that left before `call` while this one waits for a message of it.
    fn fault(
        &mut self,
        call: &Call,
        mut awaited: impl Iterator<Item = usize>,
    ) -> Option<GroupFault> {
        self.read_notices();
        self.queue
            .fault()
            .or_else(|| self.peers.fault(call))
            .or_else(|| awaited.find_map(|peer| self.peers.left(call, self.rank, peer)))
    }

    /// Reads the notices that have arrived.
    fn read_notices(&mut self) {
        let world = SimpleCommunicator::world();
        let probe = || {
            world
                .any_process()
                .immediate_matched_probe_with_tag(NOTICES)
        };
        while let Some(probed) = probe() {
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
            let mut wait = Wait::default();
            while !open.is_empty() {
                open = test(open, |_, _| {});
                if wait.since.elapsed() > self.options.deadline {
                    self.end_job("cannot notify the other ranks");
                }
                wait.pause();
            }
        });
    }

    /// Ends all processes of the job, with the reason on stderr.
    fn end_job(&self, reason: &str) -> ! {
        eprintln!("rank {} {reason}; the job ends", self.rank);
        SimpleCommunicator::world().abort(1)
    }

    fn lose(&mut self, call: &Call, fault: &GroupFault) -> ! {
        self.queue.fail(fault.clone());
        self.spread(call.sequence, fault);
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
        let others = self.others();
        others
            .filter(|&rank| self.peers.left[rank].is_none())
            .collect()
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

    fn announce(&mut self, call: &Call, message: &[u8]) -> Result<Vec<Vec<u8>>, GroupFault> {
        let sends: Vec<_> = self.others().map(|to| (to, message)).collect();
        let mut all = vec![vec![0; CALL_BYTES]; self.world_size()];
        all[self.rank] = message.to_vec();
        let into = all.iter_mut().map(|into| &mut into[..]).enumerate();
        let mut receives: Vec<_> = into.filter(|(from, _)| *from != self.rank).collect();
        let lengths = self.swap(call, CALLS, &sends, &mut receives);
        for (from, length) in self.others().zip(lengths) {
            all[from].truncate(length);
        }
        Ok(all)
    }

    fn exchange(
        &mut self,
        call: &Call,
        own: &Payload,
        sends: &[Range<usize>],
        lengths: &[usize],
        take: Take,
    ) -> Result<(), GroupFault> {
        let (rank, own) = (self.rank, (**own).as_ref());
        let size = self.options.chunk_elements * size_of::<f32>();
        let others = |of: &dyn Fn(usize) -> usize| self.others().map(of).max().unwrap_or(0);
        let (longest_send, longest) =
            (others(&|to| sends[to].len()), others(&|from| lengths[from]));
        let chunks = longest_send
            .max(longest)
            .max(sends[rank].len())
            .div_ceil(size)
            .max(1);
        // Of f32, so that the bytes are aligned for elements of all types.
        let mut staging = vec![vec![0_f32; longest.min(size).div_ceil(4)]; sends.len()];
        for at in (0..chunks).map(|chunk| chunk * size) {
            let chunk = |length: usize| at.min(length)..(at + size).min(length);
            let of_own = |to: usize| &own[sends[to].clone()][chunk(sends[to].len())];
            let out = self.others().map(|to| (to, of_own(to)));
            let out: Vec<_> = out.filter(|(_, bytes)| !bytes.is_empty()).collect();
            let into = staging
                .iter_mut()
                .enumerate()
                .filter(|(from, _)| *from != rank);
            let into = into.map(|(from, into)| {
                let into: &mut [u8] = cast_slice_mut(into);
                (from, &mut into[..chunk(lengths[from]).len()])
            });
            let mut into: Vec<_> = into.filter(|(_, bytes)| !bytes.is_empty()).collect();
            self.swap(call, DATA, &out, &mut into);
            let part = |(from, staged)| match from {
                from if from == rank => of_own(rank),
                from => &cast_slice(staged)[..chunk(lengths[from]).len()],
            };
            let parts: Vec<&[u8]> = staging
                .iter()
                .map(Vec::as_slice)
                .enumerate()
                .map(part)
                .collect();
            if at == 0 || parts.iter().any(|part| !part.is_empty()) {
                take(at, &parts);
            }
        }
        Ok(())
    }

    /// A process may work without collectives for as long as it likes.
    fn stay(&mut self) {
        self.read_notices();
        let waiting = self
            .others()
            .filter(|&rank| self.peers.left[rank].is_some());
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
        let mut wait = Wait::default();
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
                && wait.since.elapsed() > longest
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
            wait.pause();
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

/// Polling for messages: at first without pauses, for latency, then with growing pauses, so that a rank that waits for long frees its
/// core for threads that compute.
struct Wait {
    since: Instant,
    polls: u32,
}

impl Default for Wait {
    fn default() -> Self {
        let (since, polls) = (Instant::now(), 0);
        Self { since, polls }
    }
}

impl Wait {
    /// Polls without a pause, about 10 us.
    const EAGER: u32 = 50;
    /// Up to this poll each one yields the core.
    const YIELDING: u32 = 500;
    /// Up to this poll each one is followed by a short pause.
    const NAPPING: u32 = 1000;

    fn pause(&mut self) {
        self.polls = self.polls.saturating_add(1);
        match self.polls {
            polls if polls <= Self::EAGER => std::hint::spin_loop(),
            polls if polls <= Self::YIELDING => thread::yield_now(),
            polls if polls <= Self::NAPPING => thread::sleep(Duration::from_micros(50)),
            _ => thread::sleep(Duration::from_micros(500)),
        }
    }
}
