//! Ranks as processes, started by the cluster's own launcher.

mod link;

use std::{
    fmt,
    io::Write,
    panic::{self, AssertUnwindSafe},
    process,
    sync::Arc,
    thread,
    time::Duration,
};

use ::mpi::{Threading, environment::Universe, topology::SimpleCommunicator, traits::Communicator};
use link::Link;

use super::{
    GroupFault, GroupOptions, Job, Member, ProcessGroup, collectives::panic_message,
    launcher::launched, member::LAST_PANIC, queue::Queue,
};
use crate::RanksError;

/// A rank that is a process: all ranks of `MPI_COMM_WORLD`. A clone is the same rank.
///
/// One thread of this process makes all calls of MPI, so that `MPI_THREAD_FUNNELED` is enough and
/// collectives go on while other threads compute. It polls with growing pauses while it waits and
/// sleeps when there is nothing to do.
///
/// # Starting it
///
/// `mpirun -n 4 program`, or `srun -n 4 --mpi=pmix program` (Open MPI) and
/// `srun -n 4 --mpi=pmi2 program` (MPICH). Started without a launcher it is a group of one. To
/// build, Debian needs `libopenmpi-dev openmpi-bin libclang-dev clang`; with MPICH
/// `mpich libmpich-dev libclang-dev clang` and `MPICC=mpicc.mpich`, started by `mpirun.mpich`.
///
/// # Faults
///
/// A panic that the program does not catch, so that it drops the group or ends [`run`](Self::run),
/// prints its rank and message and ends the job: unwinding would wait in `MPI_Finalize` for ranks
/// that wait for this one. A process that is killed ends it too, by the launcher. Every other
/// [`GroupFault`] is returned on all ranks; the group is then lost, MPI is not finalized, and the
/// launcher ends the job when the first process exits.
///
/// Dropping the last clone waits until all ranks have dropped theirs and then finalizes MPI, which
/// a process can do only once. A rank may keep its group for any time after the last collective, to
/// evaluate or to write.
#[derive(Clone, Debug)]
pub struct MpiGroup(Member);

impl ProcessGroup for MpiGroup {
    fn member(&self) -> &Member {
        &self.0
    }
}

/// How long a process that ends the job waits to be ended.
const GRACE: Duration = Duration::from_secs(2);
/// How long a launcher gets to pass on what a process has printed before the job ends.
const FORWARDING: Duration = Duration::from_millis(100);

impl MpiGroup {
    /// Starts MPI with default options.
    ///
    /// # Errors
    ///
    /// Those of [`with_options`](Self::with_options).
    pub fn init() -> Result<Self, RanksError> {
        Self::with_options(GroupOptions::default())
    }

    /// Starts MPI. All ranks must do so, with the same options.
    ///
    /// # Errors
    ///
    /// [`RanksError::Start`] if MPI was started before in this process or the launcher belongs to
    /// another MPI, or the system starts no thread; [`RanksError::Disagreement`] if the ranks'
    /// options differ; [`RanksError::InvalidSetting`] for an impossible option.
    pub fn with_options(options: GroupOptions) -> Result<Self, RanksError> {
        options.check()?;
        let deadline = options.deadline;
        let group = Self(Member::start("MPI".to_owned(), move || connect(deadline))?);
        remember_panics();
        check_launcher(group.world_size())?;
        group.agree_equal("group options", &format!("{options:?}"))?;
        Ok(group)
    }

    /// Starts MPI, runs this rank and leaves. A rank that returns an error of its own ends the job
    /// with it, as by [`abort`](ProcessGroup::abort): the others would only see that it left. The
    /// error is returned if the group was lost before, or has one rank.
    ///
    /// ```no_run
    /// use burn_ranks::{GroupOptions, MpiGroup, ProcessGroup, ReduceOp, RanksError};
    ///
    /// MpiGroup::run(GroupOptions::default(), |group| {
    ///     group.all_reduce("gradients, step 0", ReduceOp::Mean, vec![1.0; 8].into())
    /// })?;
    /// # Ok::<(), RanksError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`with_options`](Self::with_options) and of `rank`.
    pub fn run<R, E: From<RanksError> + fmt::Display>(
        options: GroupOptions,
        rank: impl FnOnce(&Self) -> Result<R, E>,
    ) -> Result<R, E> {
        let group = Self::with_options(options)?;
        let result = panic::catch_unwind(AssertUnwindSafe(|| rank(&group)));
        let queue = group.member().queue();
        let alone = queue.world_size == 1 || queue.fault().is_some();
        match &result {
            Ok(Err(error)) if !alone => group.abort(&error.to_string()),
            Err(panic) if !alone => drop(queue.panicked(panic_message(&**panic))),
            // Clones of the group may remain.
            Ok(_) => queue.leave(),
            _ => {}
        }
        result.unwrap_or_else(|panic| panic::resume_unwind(panic))
    }
}

/// Starts MPI on this thread, which makes all calls of MPI. The universe finalizes MPI when it is
/// dropped.
fn connect(deadline: Duration) -> Result<(Arc<Queue<Job>>, Link, Universe), RanksError> {
    let (universe, provided) =
        ::mpi::initialize_with_threading(Threading::Funneled).ok_or_else(|| {
            refused(
                "it was started before in this process, and it starts only once: clone the group",
            )
        })?;
    if provided < Threading::Funneled {
        return Err(refused(
            "this library is built without threads (MPI_THREAD_FUNNELED)",
        ));
    }
    let world = SimpleCommunicator::world();
    let (rank, world_size) = (world.rank() as usize, world.size() as usize);
    let queue = Queue::new(rank, world_size, deadline, end_process);
    Ok((queue.clone(), Link::new(queue), universe))
}

fn refused(reason: impl Into<String>) -> RanksError {
    let (what, reason) = ("MPI".to_owned(), reason.into());
    RanksError::Start { what, reason }
}

/// Refuses a launcher of another MPI than the program is linked to: each process that it starts
/// would be a group of one.
fn check_launcher(world_size: usize) -> Result<(), RanksError> {
    match launched() {
        Some(processes) if world_size == 1 => {
            let version = ::mpi::environment::library_version().unwrap_or_default();
            Err(refused(format!(
                "the launcher started {processes} processes, but this program's library ({}) sees only this one: \
                 start it with that library's own mpirun, or srun --mpi=pmix or --mpi=pmi2",
                version.lines().next().unwrap_or_default()
            )))
        }
        _ => Ok(()),
    }
}

/// Installs a panic hook that keeps the message of each thread's last panic, beside printing it: a
/// group that is dropped during unwinding reports that message.
fn remember_panics() {
    let previous = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        previous(panic);
        LAST_PANIC.set(Some(panic_message(panic.payload())));
    }));
}

/// Ends this process by a fault of this rank, if the communication thread is stuck: otherwise that
/// thread ends the job within `GRACE`.
fn end_process(fault: &GroupFault) {
    thread::sleep(GRACE);
    print_end(fault);
    process::abort()
}

/// Prints with one write: launchers interleave the writes of ranks and lose late ones.
fn print_end(fault: &GroupFault) {
    let text = format!("{fault}; the job ends\n");
    let _ = std::io::stderr().write_all(text.as_bytes()); // a failure cannot be reported anywhere else
    thread::sleep(FORWARDING);
}
