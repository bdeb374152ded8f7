//! The transport by messages: every pair of ranks exchanges its parts directly, in chunks, each
//! awaited with a deadline.

use std::{
    collections::BTreeSet,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use ::mpi::{
    request::{self, Request, Scope},
    topology::SimpleCommunicator,
    traits::{Communicator, Destination, MatchedReceiveVec, Source},
};
use bytemuck::cast_slice_mut;
use serde::{Deserialize, Serialize};

use super::{GRACE, print_end};
use crate::group::{
    GroupFault, HostBuffer, Job,
    call::Call,
    part::Part,
    queue::Queue,
    transport::{Exchange, Peers, Transport},
};

/// Tag of parts of buffers.
const DATA: i32 = 1;
/// Tag of [`Notice`]s.
const NOTICES: i32 = 2;

/// Most bytes in one message: MPI counts with 31 bits.
const CHUNK_BYTES: usize = 1 << 20;

/// A message between ranks outside of collectives.
#[derive(Serialize, Deserialize)]
enum Notice {
    /// The rank takes part in no collective after this many.
    Left(u64),
    /// The group is lost, from this collective on.
    Lost(u64, GroupFault),
}

/// Most bytes of the program's text in a notice, which must fit a message that is sent without
/// waiting for its receiver. Labels are short.
const TEXT_BYTES: usize = 1000;

/// This process's connection to the others.
pub(super) struct Link {
    rank: usize,
    queue: Arc<Queue<Job>>,
    peers: Peers,
}

/// A message that has not arrived yet: the other rank, whether this rank receives it, and its
/// request.
type UnderWay<'a, S> = (usize, bool, Request<'a, [u8], S>);

impl Link {
    pub fn new(queue: Arc<Queue<Job>>) -> Self {
        Self {
            rank: queue.rank,
            peers: Peers::new(queue.world_size),
            queue,
        }
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank;
        (0..self.queue.world_size).filter(move |&rank| rank != own)
    }

    /// Sends to and receives from other ranks at the same time.
    ///
    /// On a fault it does not return: MPI cannot take back buffers that it was given. The rank's
    /// calls fail with the fault, and this thread parks.
    fn swap(&mut self, call: &Call, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])]) {
        let (world, deadline) = (SimpleCommunicator::world(), self.queue.deadline);
        request::scope(|scope| {
            let mut open: Vec<UnderWay<_>> = Vec::new();
            if let Some(fault) = self.fault(call, &open) {
                self.lose(call, &fault);
            }
            for (from, into) in receives {
                let source = world.process_at_rank(*from as i32);
                let request = source.immediate_receive_into_with_tag(scope, &mut **into, DATA);
                open.push((*from, true, request));
            }
            for &(to, bytes) in sends {
                let destination = world.process_at_rank(to as i32);
                let request = destination.immediate_send_with_tag(scope, bytes, DATA);
                open.push((to, false, request));
            }
            let (mut since, mut polls) = (Instant::now(), 0);
            while !open.is_empty() {
                let before = open.len();
                open = test(open);
                if open.len() < before {
                    (since, polls) = (Instant::now(), 0);
                    continue;
                }
                if let Some(fault) = self.fault(call, &open) {
                    self.lose(call, &fault);
                }
                if since.elapsed() > deadline {
                    let missing: BTreeSet<_> = open.iter().map(|(rank, ..)| *rank).collect();
                    let fault = GroupFault::Deadline {
                        rank: self.rank,
                        call: call.to_string(),
                        missing: missing.into_iter().collect(),
                        deadline,
                    };
                    self.lose(call, &fault);
                }
                pause(&mut polls);
            }
        });
    }

    /// A fault found by another thread or another rank, or a rank that left before the call while
    /// this one waits for a message from it.
    fn fault<'a, S: Scope<'a>>(
        &mut self,
        call: &Call,
        open: &[UnderWay<'a, S>],
    ) -> Option<GroupFault> {
        self.read_notices();
        let mut awaited = open.iter().filter(|(_, is_awaited, _)| *is_awaited);
        self.queue
            .fault()
            .or_else(|| self.peers.fault(call))
            .or_else(|| awaited.find_map(|(peer, ..)| self.peers.left(call, self.rank, *peer)))
    }

    /// Reads the notices that have arrived.
    fn read_notices(&mut self) {
        let world = SimpleCommunicator::world();
        let any = world.any_process();
        while let Some(probed) = any.immediate_matched_probe_with_tag(NOTICES) {
            let (bytes, status) = probed.matched_receive_vec::<u8>();
            let from = status.source_rank() as usize;
            match serde_json::from_slice(&bytes).expect("ranks run the same program") {
                Notice::Left(calls) => self.peers.left[from] = Some(calls),
                Notice::Lost(sequence, fault) => self.peers.lose(sequence, &fault),
            }
        }
    }

    /// Sends a notice to other ranks. It is small, so that MPI takes it at once, whatever its
    /// receiver does.
    fn notify(&self, to: impl Iterator<Item = usize>, notice: &Notice) {
        let world = SimpleCommunicator::world();
        let bytes = serde_json::to_vec(notice).expect("a notice is plain data");
        request::scope(|scope| {
            let send = |to| {
                let destination = world.process_at_rank(to as i32);
                let request = destination.immediate_send_with_tag(scope, &bytes[..], NOTICES);
                (to, false, request)
            };
            let mut open: Vec<_> = to.map(send).collect();
            let (since, mut polls) = (Instant::now(), 0);
            while !open.is_empty() {
                open = test(open);
                if since.elapsed() > self.queue.deadline {
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

    fn lose(&mut self, call: &Call, fault: &GroupFault) -> ! {
        self.queue.fail(fault);
        self.spread(call.sequence, fault);
        self.park()
    }

    /// Waits for the end of the process, with the group lost. MPI is not finalized: that would wait
    /// for other ranks.
    fn park(&self) -> ! {
        self.queue.end();
        loop {
            thread::park();
        }
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
    fn exchange(&mut self, it: Exchange<'_>) -> Result<Vec<Part>, GroupFault> {
        let (own, sends, lengths) = (it.own, it.sends, it.lengths);
        let (rank, bytes) = (self.rank, (**own).as_ref());
        // Vectors of f32, so that the bytes are aligned for elements of all types.
        let elements =
            |(from, length): (usize, &usize)| if from == rank { 0 } else { length.div_ceil(4) };
        let sizes = lengths.iter().enumerate().map(elements);
        let mut received: Vec<_> = sizes.map(|elements| vec![0_f32; elements]).collect();
        // Messages between two ranks arrive in order.
        let out = self.others().flat_map(|to| {
            let chunks = bytes[sends[to].clone()].chunks(CHUNK_BYTES);
            chunks.map(move |chunk| (to, chunk))
        });
        let out: Vec<_> = out.collect();
        let others = received.iter_mut().enumerate();
        let into = others.filter(|(from, _)| *from != rank);
        let into = into.flat_map(|(from, all)| {
            let all = &mut cast_slice_mut::<f32, u8>(all)[..lengths[from]];
            all.chunks_mut(CHUNK_BYTES).map(move |chunk| (from, chunk))
        });
        self.swap(it.call, &out, &mut into.collect::<Vec<_>>());
        let part = |(from, received)| match from == rank {
            true => Part(own.clone(), sends[rank].clone()),
            false => Part(Arc::new(HostBuffer::F32(received)), 0..lengths[from]),
        };
        Ok(received.into_iter().enumerate().map(part).collect())
    }

    /// Ends the job if this rank panicked or aborted the group.
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

    /// Waits until all ranks have left, so that finalizing MPI does not wait. This has no deadline:
    /// a process may run for any time after its last collective.
    fn leave(&mut self, calls: u64) {
        self.notify(self.others(), &Notice::Left(calls));
        let mut polls = 0;
        while self.others().any(|rank| self.peers.left[rank].is_none()) {
            self.read_notices();
            if let Some((_, fault)) = self.peers.lost.take() {
                eprintln!("rank {} has left its group: {fault}", self.rank);
                self.queue.fail(&fault);
                // This process may be about to exit with success: processes that failed shall exit
                // before it.
                thread::sleep(GRACE);
                self.park();
            }
            pause(&mut polls);
        }
    }
}

/// Tests all messages, and returns those that have not arrived.
fn test<'a, S: Scope<'a>>(messages: Vec<UnderWay<'a, S>>) -> Vec<UnderWay<'a, S>> {
    let open = |(rank, is_awaited, request): UnderWay<'a, S>| {
        let open = request.test().err()?;
        Some((rank, is_awaited, open))
    };
    messages.into_iter().filter_map(open).collect()
}

/// Pauses between two polls for messages: for about the first 10 us not at all, for latency; then
/// longer and longer, so that a rank that waits for long frees its core for threads that compute.
fn pause(polls: &mut u32) {
    *polls = polls.saturating_add(1);
    match *polls {
        0..=50 => std::hint::spin_loop(),
        51..=500 => thread::yield_now(),
        501..=1000 => thread::sleep(Duration::from_micros(50)),
        _ => thread::sleep(Duration::from_micros(500)),
    }
}
