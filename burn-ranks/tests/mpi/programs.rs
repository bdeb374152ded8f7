//! What the ranks of a job run.

use std::{error::Error, panic, process, sync::OnceLock, thread, time::Duration};

use burn_ranks::{
    BufferDtype, GroupOptions, HostBuffer, MpiGroup, Operation, ProcessGroup, RanksError, ReduceOp,
    Split,
};

use crate::launch::signal;
use crate::support::{DTYPES, buffer, every_collective, reduced, start_all_reduce};

/// Deadline of the programs in which somebody hangs.
pub const DEADLINE: Duration = Duration::from_secs(1);

pub fn run(program: &str) {
    match program {
        "laws" => laws(),
        "chunks" => chunks(),
        "bytes" => bytes(),
        "overlap" => overlap(),
        "panic" => panics(),
        "panic in run" => panics_in_run(),
        "panic that is caught" => panics_that_are_caught(),
        "panic while others compute" => panic_while_others_compute(),
        "killed" => killed(),
        "hang" => hang(),
        "stopped" => stopped(),
        "leave" => leave(),
        "error" => error(),
        "mismatch" => mismatch(),
        "skip" => skip(),
        "abort" => abort(),
        "options differ" => options_differ(),
        "twice" => twice(),
        "afterwards" => afterwards(),
        other => panic!("no program {other}"),
    }
}

fn start(options: GroupOptions) -> MpiGroup {
    MpiGroup::with_options(options).unwrap_or_else(|error| panic!("{error}"))
}

fn patient() -> MpiGroup {
    start(GroupOptions::default())
}

fn hasty() -> MpiGroup {
    start(GroupOptions::with_deadline(DEADLINE))
}

/// Prints the error as every rank should, and exits as a program whose `main` returns it.
pub fn report<T>(group: &MpiGroup, result: Result<T, RanksError>) {
    if let Err(error) = result {
        println!("rank {}: {error}", group.rank());
        // Other ranks print theirs before the launcher ends the job.
        thread::sleep(Duration::from_millis(300));
        process::exit(1);
    }
}

/// Several chunks of a part, the last of which is not full.
fn chunks() {
    let group = patient();
    for dtype in DTYPES {
        let (rank, ranks, elements) = (group.rank(), group.world_size(), 1_700_001);
        let sum = group.all_reduce("", ReduceOp::Sum, buffer(dtype, rank, elements));
        assert_eq!(sum.unwrap(), reduced(dtype, ReduceOp::Sum, ranks, elements));
    }
}

fn laws() {
    let group = patient();
    let digest = every_collective(&group).unwrap();
    println!("digest {digest:x}");
}

fn bytes() {
    let group = patient();
    let whole = || HostBuffer::zeros(BufferDtype::F16, 1200);
    let part = HostBuffer::zeros(BufferDtype::F16, 1200 / group.world_size());
    group.all_reduce("a", ReduceOp::Mean, whole()).unwrap();
    group
        .reduce_scatter("b", ReduceOp::Mean, whole(), Split::Equal)
        .unwrap();
    group.all_gather("c", part, Split::Equal).unwrap();
    group.broadcast("d", 0, whole()).unwrap();
    group.gather_bytes_to("e", 0, vec![0; 100_000]).unwrap();
    let sent = |operation| group.traffic().of(operation).data_bytes;
    println!(
        "sent {} {} {} {} {} {}",
        group.rank(),
        sent(Operation::AllReduce),
        sent(Operation::ReduceScatter),
        sent(Operation::AllGather),
        sent(Operation::Broadcast),
        sent(Operation::GatherBytesTo)
    );
}

fn overlap() {
    let group = patient();
    let pending: Vec<_> = (0..20_usize)
        .map(|bucket| {
            let values = vec![(group.rank() + bucket) as f32; bucket * 5000];
            start_all_reduce(
                &group,
                &format!("bucket {bucket}"),
                ReduceOp::Sum,
                values.into(),
            )
        })
        .collect();
    let ranks = group.world_size();
    for (bucket, pending) in pending.into_iter().enumerate() {
        let sum = (ranks * (ranks - 1) / 2 + ranks * bucket) as f32;
        assert_eq!(pending.wait().unwrap(), vec![sum; bucket * 5000].into());
    }
}

/// Whoever catches a panic goes on: here, in a thread of its own, and where a group is not dropped.
fn panics_that_are_caught() {
    let group = patient();
    group.barrier("together").unwrap();
    if group.rank() == 1 {
        let here = panic::catch_unwind(|| panic!("caught here"));
        let there = thread::spawn(|| panic!("caught there")).join();
        let clone = group.clone();
        let with_clone = panic::catch_unwind(panic::AssertUnwindSafe(move || {
            let _clone = clone;
            panic!("caught with a clone of the group")
        }));
        let caught: [Result<(), _>; 3] = [here, there, with_clone];
        assert!(caught.iter().all(Result::is_err));
    }
    group.barrier("all go on").unwrap();
    println!("went on {}", group.rank());
}

fn panics_in_run() {
    // A clone lives longer than the program's main function.
    static KEPT: OnceLock<MpiGroup> = OnceLock::new();
    let result = MpiGroup::run(GroupOptions::default(), |group| {
        let _ = KEPT.set(group.clone());
        group.barrier("together")?;
        if group.rank() == 1 {
            panic!("the loss is not a number");
        }
        group.barrier("never")
    });
    println!("{}", result.unwrap_err());
}

fn panics() {
    let group = patient();
    group.barrier("together").unwrap();
    if group.rank() == 1 {
        panic!("the loss is not a number");
    }
    report(&group, group.barrier("never"));
}

fn panic_while_others_compute() {
    let group = patient();
    group.barrier("together").unwrap();
    if group.rank() == 1 {
        panic!("the loss is not a number");
    }
    thread::sleep(Duration::from_secs(50));
}

fn killed() {
    let group = patient();
    group.barrier("together").unwrap();
    if group.rank() == 1 {
        signal("-KILL");
    }
    report(&group, group.barrier("never"));
}

fn hang() {
    let group = hasty();
    group.barrier("together").unwrap();
    if group.rank() == 1 {
        thread::sleep(Duration::from_secs(50));
    }
    report(
        &group,
        group.all_reduce("step 7", ReduceOp::Mean, vec![0.0; 10].into()),
    );
}

/// The whole process hangs, the thread that calls MPI included, in the middle of a transfer.
fn stopped() {
    let group = hasty();
    group.barrier("together").unwrap();
    if group.rank() == 1 {
        let _sending = start_all_reduce(
            &group,
            "large",
            ReduceOp::Mean,
            vec![0.0; 10_000_000].into(),
        );
        thread::sleep(Duration::from_millis(20));
        signal("-STOP");
    }
    report(
        &group,
        group.all_reduce("large", ReduceOp::Mean, vec![0.0; 10_000_000].into()),
    );
}

/// The first rank has something to do that takes longer than the deadline, and is no concern of the
/// others.
fn afterwards() {
    let group = hasty();
    group.barrier("the end").unwrap();
    let rank = group.rank();
    if rank == 0 {
        thread::sleep(4 * DEADLINE);
    }
    drop(group);
    println!("left {rank}");
}

fn leave() {
    let group = patient();
    group.barrier("step 0").unwrap();
    if group.rank() != 1 {
        report(&group, group.barrier("step 1"));
    }
}

/// A rank that fails on its own.
fn error() {
    let result = MpiGroup::run(
        GroupOptions::default(),
        |group| -> Result<(), Box<dyn Error>> {
            group.barrier("step 0")?;
            if group.rank() == 1 {
                return Err("no such file".into());
            }
            Ok(group.barrier("step 1")?)
        },
    );
    if let Err(error) = result {
        println!("{error}");
        process::exit(1);
    }
}

fn mismatch() {
    let group = patient();
    let elements = if group.rank() == 1 { 11 } else { 10 };
    let values = HostBuffer::zeros(BufferDtype::Bf16, elements);
    report(&group, group.all_reduce("bucket 3", ReduceOp::Mean, values));
}

fn skip() {
    let group = patient();
    for step in 0..6 {
        if group.rank() == 1 && step == 3 {
            continue;
        }
        let label = format!("gradients, step {step}");
        report(
            &group,
            group.all_reduce(&label, ReduceOp::Mean, vec![1.0; 10].into()),
        );
    }
}

fn abort() {
    let group = patient();
    group.barrier("together").unwrap();
    if group.rank() == 1 {
        group.abort("the disk is full");
    }
    report(&group, group.barrier("never"));
}

fn options_differ() {
    let rank: u64 = ["OMPI_COMM_WORLD_RANK", "PMI_RANK"]
        .iter()
        .find_map(|name| std::env::var(name).ok()?.parse().ok())
        .unwrap();
    let options = GroupOptions {
        deadline: Duration::from_secs(100 + rank),
    };
    if let Err(error) = MpiGroup::with_options(options) {
        println!("rank {rank}: {error}");
        process::exit(1);
    }
}

fn twice() {
    let group = patient();
    println!("second: {}", MpiGroup::init().unwrap_err());
    group.barrier("the first goes on").unwrap();
}
