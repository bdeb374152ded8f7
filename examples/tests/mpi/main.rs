//! The gpt example under `mpirun`: this program starts itself as the ranks, and compares them with
//! ranks that are threads. And its model, in ranks whose memory is limited.

#[allow(dead_code, reason = "the tests of the library use the rest")]
#[path = "../../../burn-ranks/tests/mpi/launch.rs"]
mod launch;
mod limited;

use std::path::Path;
use std::time::Duration;

use clap::Parser;
use examples::gpt::options::Options;
use examples::gpt::report::Report;
use examples::gpt::run;

/// Longest that a job may take.
const LONGEST: Duration = Duration::from_secs(240);

const TESTS: [launch::Test; 3] = [
    ("processes_are_threads", processes_are_threads),
    ("a_launcher_decides_how_many", a_launcher_decides_how_many),
    (
        "a_gpt_trains_within_a_limit_that_it_exceeds_without_stage_two",
        limited::a_gpt_trains_within_a_limit_that_it_exceeds_without_stage_two,
    ),
];

fn main() {
    launch::main(&TESTS, |program| {
        if let Some(program) = program.strip_prefix(limited::PROGRAM) {
            return limited::rank(program);
        }
        if let Err(error) = run(&Options::parse_from(program.split_whitespace())) {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    });
}

fn arguments(directory: &Path, more: &str) -> String {
    let text = directory.join("text.txt");
    std::fs::write(
        &text,
        "the quick brown fox jumps over the lazy dog. ".repeat(60),
    )
    .expect("the directory is new");
    format!(
        "gpt --steps 4 --eval-every 2 --batch 4 --context 16 --layers 1 --heads 2 --width 16 --text {} --output {}/run {more}",
        text.display(),
        directory.display()
    )
}

/// Runs a job of two processes to its end: whether it succeeded, and what it printed.
fn job(arguments: &str) -> (bool, String) {
    let ended = launch::run_after(2, arguments, "", LONGEST);
    (ended.success, ended.output)
}

fn processes_are_threads() {
    for more in [
        "--zero 2",
        "--zero 1 --amp f16 --accum 2",
        "--zero 2 --offload",
    ] {
        let directories = [(); 2].map(|()| tempfile::tempdir().expect("a directory"));
        let (success, printed) = job(&arguments(directories[0].path(), more));
        assert!(success, "{more}: {printed}");
        // Rank 0 alone shows what goes on.
        assert_eq!(printed.matches("bytes of text").count(), 1, "{printed}");
        let report = std::fs::read(directories[0].path().join("run/report.json"));
        let report: Report =
            serde_json::from_slice(&report.expect("rank 0 wrote it")).expect("it is a report");

        let threads = arguments(directories[1].path(), &format!("{more} --ranks 2"));
        let threads = run(&Options::parse_from(threads.split_whitespace()))
            .expect("it is the same training")
            .expect("rank 0 is here");
        assert_eq!(report.epochs, threads.epochs, "{more}");
        assert_eq!(report.sample, threads.sample, "{more}");
        assert_eq!((report.ranks, threads.ranks), (2, 2));
    }
}

fn a_launcher_decides_how_many() {
    let directory = tempfile::tempdir().expect("a directory");
    let (success, printed) = job(&arguments(directory.path(), "--ranks 3"));
    assert!(!success);
    assert!(
        printed.contains("--ranks 3, but the launcher started 2 processes,"),
        "{printed}"
    );
}
