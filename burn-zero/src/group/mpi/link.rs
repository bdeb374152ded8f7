//! Messages between processes, each awaited with a deadline.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeSet,
    sync::{Arc, mpsc::Sender},
    thread,
    time::Instant,
};

use ::mpi::{
    datatype::Equivalence,
    request,
    topology::SimpleCommunicator,
    traits::{Communicator, Destination, MatchedReceiveVec, Source},
};

use super::{
    GRACE,
    notice::Notice,
    poll::{Wait, open, poll},
    print_end,
};
use crate::group::{Call, GroupFault, GroupOptions, job::Queue};

/// The calls that start collectives.
pub(super) const CALLS: i32 = 1;
/// Elements of buffers.
pub(super) const DATA: i32 = 2;
/// [`Notice`]s.
const NOTICES: i32 = 3;

/// This process's connection to the others.
pub(super) struct Link {
    world: SimpleCommunicator,
    queue: Arc<Queue>,
    pub options: GroupOptions,
    end: Sender<()>,
    /// Collectives in which each rank took part, if it has left.
    left: RefCell<Vec<Option<u64>>>,
    /// When each rank gave notice of itself last, or this one began to wait for it.
    heard: RefCell<Vec<Instant>>,
    /// The fault with the earliest call that another rank has reported, and that call: messages of calls before it may still
    /// arrive.
    lost: RefCell<Option<(u64, GroupFault)>>,
    /// This rank's call.
    calling: Cell<u64>,
}

impl Link {
    pub fn new(
        world: SimpleCommunicator,
        queue: Arc<Queue>,
        options: GroupOptions,
        end: Sender<()>,
    ) -> Self {
        let left = RefCell::new(vec![None; world.size() as usize]);
        let heard = RefCell::new(vec![Instant::now(); world.size() as usize]);
        Self {
            world,
            queue,
            options,
            end,
            left,
            heard,
            lost: RefCell::new(None),
            calling: Cell::new(0),
        }
    }

    pub fn rank(&self) -> usize {
        self.world.rank() as usize
    }

    pub fn world_size(&self) -> usize {
        self.world.size() as usize
    }

    pub fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let own = self.rank();
        (0..self.world_size()).filter(move |&rank| rank != own)
    }

    /// Sends to and receives from other ranks at the same time, and returns how many bytes each buffer received.
    ///
    /// On a fault it does not return: MPI cannot take back buffers that it was given. The rank's calls fail with
    /// the fault, and this thread parks.
    pub fn exchange(
        &self,
        call: &Call,
        tag: i32,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Vec<usize> {
        self.calling.set(call.sequence);
        if let Some(fault) = self.news(call, std::iter::empty()) {
            self.lose(&fault);
        }
        let mut lengths = vec![0; receives.len()];
        request::scope(|scope| {
            let mut receiving: Vec<_> = receives
                .iter_mut()
                .map(|(from, into)| {
                    let source = self.world.process_at_rank(*from as i32);
                    let request = source.immediate_receive_into_with_tag(scope, &mut **into, tag);
                    (*from, Some(request))
                })
                .collect();
            let mut sending: Vec<_> = sends
                .iter()
                .map(|&(to, bytes)| {
                    let destination = self.world.process_at_rank(to as i32);
                    (
                        to,
                        Some(destination.immediate_send_with_tag(scope, bytes, tag)),
                    )
                })
                .collect();
            let mut wait = Wait::new(self.options.deadline);
            loop {
                let received = poll(&mut receiving, |index, status| {
                    lengths[index] = status.count(u8::equivalent_datatype()) as usize;
                });
                let sent = poll(&mut sending, |_, _| {});
                if open(&receiving).chain(open(&sending)).next().is_none() {
                    return;
                }
                if received || sent {
                    wait.restart();
                    continue;
                }
                if let Some(fault) = self.news(call, open(&receiving)) {
                    self.lose(&fault);
                }
                if wait.is_over() {
                    self.lose(&self.deadline_fault(call, open(&receiving).chain(open(&sending))));
                }
                wait.pause();
            }
        });
        lengths
    }

    fn deadline_fault(&self, call: &Call, awaited: impl Iterator<Item = usize>) -> GroupFault {
        let missing: BTreeSet<_> = awaited.collect();
        GroupFault::Deadline {
            rank: self.rank(),
            call: call.to_string(),
            missing: missing.into_iter().collect(),
            deadline: self.options.deadline,
        }
    }

    /// A fault found by another thread or another rank, or a rank that left before `call`.
    fn news(&self, call: &Call, mut awaited: impl Iterator<Item = usize>) -> Option<GroupFault> {
        if let Some(fault) = self.queue.fault() {
            return Some(fault);
        }
        self.read_notices();
        if let Some((sequence, fault)) = &*self.lost.borrow()
            && *sequence <= call.sequence
        {
            return Some(fault.clone());
        }
        awaited.find_map(|peer| {
            let calls = self.left.borrow()[peer].filter(|&calls| calls <= call.sequence)?;
            Some(GroupFault::PeerLeft {
                rank: self.rank(),
                call: call.to_string(),
                peer,
                calls,
            })
        })
    }

    /// Reads the notices that have arrived.
    fn read_notices(&self) {
        while let Some(probed) = self
            .world
            .any_process()
            .immediate_matched_probe_with_tag(NOTICES)
        {
            let (bytes, status) = probed.matched_receive_vec::<u8>();
            let from = status.source_rank() as usize;
            self.heard.borrow_mut()[from] = Instant::now();
            match Notice::decode(&bytes) {
                Notice::Left(calls) => self.left.borrow_mut()[from] = Some(calls),
                Notice::Staying => {}
                Notice::Lost { sequence, fault } => {
                    let mut lost = self.lost.borrow_mut();
                    if lost
                        .as_ref()
                        .is_none_or(|(earliest, _)| sequence < *earliest)
                    {
                        *lost = Some((sequence, fault));
                    }
                }
            }
        }
    }

    /// Sends a notice to other ranks. It is small, so that MPI takes it at once, whatever its receiver does.
    fn notify(&self, peers: impl Iterator<Item = usize>, notice: &Notice) {
        let bytes = notice.encode();
        request::scope(|scope| {
            let mut sending: Vec<_> = peers
                .map(|to| {
                    let destination = self.world.process_at_rank(to as i32);
                    Some(destination.immediate_send_with_tag(scope, &bytes[..], NOTICES))
                })
                .collect();
            let mut wait = Wait::new(self.options.deadline);
            loop {
                for pending in &mut sending {
                    *pending = pending.take().and_then(|request| request.test().err());
                }
                if sending.iter().all(Option::is_none) {
                    return;
                }
                if wait.is_over() {
                    eprintln!(
                        "rank {}: MPI has not sent a notice for {:?}, so that others may not know that the group is lost; the job ends",
                        self.rank(),
                        self.options.deadline,
                    );
                    self.world.abort(1);
                }
                wait.pause();
            }
        });
    }

    /// Tells all others that the group is lost; ends the job if this rank panicked or gave up.
    pub fn spread(&self, fault: &GroupFault) {
        let own = self.rank();
        match fault {
            GroupFault::Aborted { rank, .. } | GroupFault::PeerPanicked { rank, .. }
                if *rank == own =>
            {
                print_end(fault);
                self.world.abort(1)
            }
            _ => {
                let notice = Notice::lost(self.calling.get(), fault.clone());
                self.notify(self.peers(), &notice);
            }
        }
    }

    fn lose(&self, fault: &GroupFault) -> ! {
        self.queue.fail(fault.clone());
        self.spread(fault);
        self.park()
    }

    /// Waits for the end of the process, with the group lost. MPI is not finalized: that would wait for other ranks.
    pub fn park(&self) -> ! {
        let _ = self.end.send(());
        loop {
            thread::park();
        }
    }

    /// Tells the ranks that wait in [`leave`](Self::leave) that this process is alive: it may work without collectives.
    pub fn stay(&self) {
        self.read_notices();
        let waiting = self
            .peers()
            .filter(|&rank| self.left.borrow()[rank].is_some());
        self.notify(waiting.collect::<Vec<_>>().into_iter(), &Notice::Staying);
    }

    /// The ranks that have not left.
    fn staying(&self) -> Vec<usize> {
        let left = self.left.borrow();
        self.peers().filter(|&rank| left[rank].is_none()).collect()
    }

    /// Waits until all ranks have left, so that finalizing MPI does not wait; or until one gives no notice of itself for the
    /// deadline, or stays for longer than it may.
    pub fn leave(&self, calls: u64) {
        self.notify(self.peers(), &Notice::Left(calls));
        self.heard.borrow_mut().fill(Instant::now());
        let deadline = self.options.deadline;
        let start = Instant::now();
        let mut wait = Wait::new(deadline);
        while !self.staying().is_empty() {
            self.read_notices();
            if let Some((_, fault)) = self.lost.take() {
                eprintln!("rank {} has left its group: {fault}", self.rank());
                self.queue.fail(fault);
                // This process may be about to exit with success: processes that failed shall exit before it.
                thread::sleep(GRACE);
                self.park();
            }
            let mut missing = self.staying();
            missing.retain(|&rank| self.heard.borrow()[rank].elapsed() > deadline);
            if !missing.is_empty() {
                eprintln!(
                    "rank {} has left its group and heard nothing of ranks {missing:?} for {deadline:?}; the job ends",
                    self.rank(),
                );
                self.world.abort(1);
            }
            if let Some(longest) = self.options.longest_stay
                && start.elapsed() > longest
            {
                eprintln!(
                    "rank {} has left its group, and ranks {:?} have stayed for {longest:?} since; the job ends",
                    self.rank(),
                    self.staying(),
                );
                self.world.abort(1);
            }
            wait.pause();
        }
    }
}
