//! Writers that are killed at random points, and disks that are full, leave the last complete
//! record usable.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use burn_zero::record::{
    Dtype, Entry, Keep, ShardedRecord, TensorSlice, TensorSpec, TrainingState,
};
use burn_zero::{GroupOptions, ProcessGroup, SingleRank, ThreadGroup, save_sharded};

use super::{names, read_all};

/// Where a child process saves its records.
const DIR: &str = "BURN_ZERO_TEST_RECORDS";

const RANKS: usize = 3;

/// One tensor that takes some time to write, and many that do not.
fn tensors() -> Vec<TensorSpec> {
    let large = TensorSpec::new("model/large", Dtype::F32, [600, 1000]);
    let small = (0..20).map(|i| TensorSpec::new(format!("model/small.{i}"), Dtype::U8, [7, i]));
    small.chain([large]).collect()
}

/// The bytes of a tensor at a step.
fn bytes(tensor: &TensorSpec, step: u64) -> Vec<u8> {
    let length = TensorSlice::whole(tensor.clone()).bytes();
    let seed = step as usize * 31 + tensor.name.len();
    (0..length).map(|i| (i * 7 + seed) as u8).collect()
}

fn save(group: &dyn ProcessGroup, dir: &Path, step: u64) -> Result<(), String> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let pieces = tensors().into_iter().map(|tensor| {
        let elements = tensor.elements().expect("small");
        let share = elements.div_ceil(ranks);
        let range = (rank * share).min(elements)..((rank + 1) * share).min(elements);
        let width = tensor.dtype.bitsize() / 8;
        let bytes = bytes(&tensor, step)[range.start * width..range.end * width].to_vec();
        Entry::new(TensorSlice::new(tensor, range), bytes)
    });
    let state = TrainingState::at_step(step);
    let saved = save_sharded(dir, group, pieces.collect(), state, Keep::default());
    saved.map(drop).map_err(|error| error.to_string())
}

/// The step of the last record of `dir`, every byte of which is what was written at that step.
fn verified_step(dir: &Path) -> u64 {
    let mut record = ShardedRecord::open(dir, None).unwrap();
    let step = record.state().step;
    for tensor in tensors() {
        let read = record.read(&TensorSlice::whole(tensor.clone())).unwrap();
        assert!(
            read == bytes(&tensor, step),
            "{} of step {step}",
            tensor.name
        );
    }
    step
}

/// This test binary as a process that does nothing but one of the functions below.
fn child(test: &str, dir: &Path) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    command
        .env(DIR, dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command
}

/// Where this process is to save, if it is such a child and not run by itself.
fn dir() -> Option<PathBuf> {
    env::var_os(DIR).map(PathBuf::from)
}

/// Saves one record after the other until it is killed, and says which are complete.
#[test]
#[ignore = "a child process of writers_may_be_killed"]
fn writer() {
    let Some(dir) = dir() else { return };
    let first = ShardedRecord::open(&dir, None).unwrap().state().step + 1;
    ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
        for step in first.. {
            save(&group, &dir, step).unwrap();
            if group.rank() == 0 {
                println!("\nsaved {step}");
            }
        }
    })
    .unwrap();
}

/// Waits for the child's first record, so that it is killed while it saves and not while it starts.
fn wait_for_first(child: &mut Child) -> (BufReader<ChildStdout>, u64) {
    let mut output = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while output.read_line(&mut line).unwrap() > 0 {
        if let Some(step) = line.trim().strip_prefix("saved ") {
            let step = step.parse().unwrap();
            return (output, step);
        }
        line.clear();
    }
    panic!("the child ended before it saved: {:?}", child.wait());
}

/// Waits until a record is being written, for some seconds at most.
fn wait_for_partial(dir: &Path) {
    let start = Instant::now();
    let is_partial = |entry: fs::DirEntry| entry.path().extension() == Some("partial".as_ref());
    while start.elapsed() < Duration::from_secs(10) {
        let mut entries = fs::read_dir(dir).unwrap().map_while(Result::ok);
        if entries.any(is_partial) {
            return;
        }
        sleep(Duration::from_millis(1));
    }
}

#[test]
fn writers_may_be_killed() {
    let dir = tempfile::tempdir().unwrap();
    save(&SingleRank::new(), dir.path(), 1).unwrap();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let mut random = now.unwrap().as_nanos() as u64 | 1;
    println!("seed {random}");
    let mut unfinished = 0;
    for round in 0..40 {
        let mut child = child("crash::writer", dir.path()).spawn().unwrap();
        let (output, first) = wait_for_first(&mut child);
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        if round % 2 == 0 {
            sleep(Duration::from_micros(random % 60_000));
        } else {
            // On a machine with much to do a writer may take long to come to writing.
            wait_for_partial(dir.path());
            sleep(Duration::from_micros(random % 4_000));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let said = output
            .lines()
            .map_while(Result::ok)
            .filter_map(|line| line.strip_prefix("saved ")?.parse().ok())
            .fold(first, u64::max);
        let step = verified_step(dir.path());
        // What it said to be saved is; one more may be, of which it could not tell any more.
        assert!(
            (said..=said + 1).contains(&step),
            "round {round}: {said} saved, {step} found"
        );
        for name in names(dir.path()) {
            if name.ends_with(".partial") {
                unfinished += 1;
                continue;
            }
            let read = read_all(&dir.path().join(&name));
            read.unwrap_or_else(|error| panic!("round {round}: {error}"));
        }
    }
    assert!(unfinished > 0, "no writer was killed while it wrote");
}

/// Saves one record, and says how that went.
#[test]
#[ignore = "a child process of a_full_disk_costs_no_record"]
fn one_save() {
    let Some(dir) = dir() else { return };
    let results = ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
        save(&group, &dir, 2)
    });
    for result in results.unwrap() {
        println!("\nresult: {result:?}");
    }
}

/// A limit on the size of files is a disk that is full for the operating system's part of it.
#[cfg(unix)]
#[test]
fn a_full_disk_costs_no_record() {
    let dir = tempfile::tempdir().unwrap();
    save(&SingleRank::new(), dir.path(), 1).unwrap();
    // In blocks of 512 or 1024 bytes; the part of a rank has 800,000.
    for blocks in [0, 1, 10, 100, 700] {
        let inner = child("crash::one_save", dir.path());
        let mut command = Command::new("sh");
        let limited = format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$@\"");
        command
            .args(["-c", &limited, "sh"])
            .arg(inner.get_program());
        command.args(inner.get_args()).env(DIR, dir.path());
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let results: Vec<_> = text
            .lines()
            .filter(|line| line.starts_with("result: "))
            .collect();
        assert_eq!(
            results.len(),
            RANKS,
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        for result in results {
            assert!(
                result.contains("cannot write") && result.contains("too large"),
                "{result}"
            );
        }
        assert_eq!(verified_step(dir.path()), 1);
        let names = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(names, 1, "only the record is left");
    }
    save(&SingleRank::new(), dir.path(), 2).unwrap();
    assert_eq!(verified_step(dir.path()), 2);
}
