//! Jobs and what they must do.

use std::{process::Command, time::Duration};

use burn_ranks::{GroupOptions, ThreadGroup};

use crate::{launch, programs, support::every_collective};

pub const ALL: &[launch::Test] = &[
    (
        "processes_and_threads_give_the_same_bits",
        processes_and_threads_give_the_same_bits,
    ),
    ("chunks_do_not_show", chunks_do_not_show),
    ("bytes_sent_are_the_formulas", bytes_sent_are_the_formulas),
    (
        "started_collectives_run_in_order",
        started_collectives_run_in_order,
    ),
    (
        "a_process_without_a_launcher_is_a_group_of_one",
        a_process_without_a_launcher_is_a_group_of_one,
    ),
    (
        "a_panic_ends_the_job_with_its_message",
        a_panic_ends_the_job_with_its_message,
    ),
    (
        "a_panic_ends_ranks_that_compute",
        a_panic_ends_ranks_that_compute,
    ),
    (
        "a_panic_that_is_caught_ends_nothing",
        a_panic_that_is_caught_ends_nothing,
    ),
    ("a_killed_rank_ends_the_job", a_killed_rank_ends_the_job),
    (
        "a_rank_that_hangs_is_named_by_all",
        a_rank_that_hangs_is_named_by_all,
    ),
    ("a_stopped_process_is_named", a_stopped_process_is_named),
    (
        "a_rank_that_leaves_is_named_at_once",
        a_rank_that_leaves_is_named_at_once,
    ),
    (
        "an_error_of_one_rank_ends_the_job",
        an_error_of_one_rank_ends_the_job,
    ),
    (
        "ranks_that_differ_get_both_sides",
        ranks_that_differ_get_both_sides,
    ),
    (
        "a_skipped_collective_is_found_by_its_label",
        a_skipped_collective_is_found_by_its_label,
    ),
    (
        "a_rank_that_gives_up_says_why",
        a_rank_that_gives_up_says_why,
    ),
    (
        "options_that_differ_are_refused",
        options_that_differ_are_refused,
    ),
    ("mpi_starts_once", mpi_starts_once),
    (
        "a_rank_may_stay_for_longer_than_the_deadline",
        a_rank_may_stay_for_longer_than_the_deadline,
    ),
];

/// "In seconds": starting and ending a job included, on a loaded machine.
const SECONDS: Duration = Duration::from_secs(12);

fn digest_of_threads(world_size: usize) -> String {
    let options = GroupOptions::default();
    let digests = ThreadGroup::spawn(world_size, options, |group| {
        every_collective(&group).unwrap()
    });
    let digests: Vec<_> = digests
        .unwrap()
        .iter()
        .map(|digest| format!("{digest:x}"))
        .collect();
    digests.join(" ")
}

fn same_bits_as_threads(ranks: usize) {
    let job = launch::run(ranks, "laws");
    job.must_succeed();
    let mut digests = job.marked("digest ");
    digests.sort_unstable();
    let threads = digest_of_threads(ranks);
    let mut expected: Vec<_> = threads.split(' ').collect();
    expected.sort_unstable();
    assert_eq!(digests, expected);
}

fn processes_and_threads_give_the_same_bits() {
    (1..=4).for_each(same_bits_as_threads);
}

fn chunks_do_not_show() {
    for ranks in [2, 3] {
        launch::run(ranks, "chunks").must_succeed();
    }
}

fn bytes_sent_are_the_formulas() {
    for ranks in 1..=4 {
        let job = launch::run(ranks, "bytes");
        job.must_succeed();
        let mut lines = job.marked("sent ");
        lines.sort_unstable();
        let shard = 2 * (1200 - 1200 / ranks);
        for (rank, line) in lines.iter().enumerate() {
            let broadcast = if rank == 0 { 2 * shard } else { shard };
            let gathered = if rank == 0 { 0 } else { 100_000 };
            assert_eq!(
                *line,
                format!(
                    "{rank} {} {shard} {shard} {broadcast} {gathered}",
                    2 * shard
                )
            );
        }
        assert_eq!(lines.len(), ranks);
    }
}

fn started_collectives_run_in_order() {
    launch::run(3, "overlap").must_succeed();
}

fn a_process_without_a_launcher_is_a_group_of_one() {
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program)
        .env(launch::PROGRAM, "laws")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.trim(), format!("digest {}", digest_of_threads(1)));
}

fn a_panic_ends_the_job_with_its_message() {
    for program in ["panic", "panic in run"] {
        let job = launch::run(3, program);
        job.must_fail_with(
            "rank 1 panicked: the loss is not a number; the job ends",
            SECONDS,
        );
    }
}

fn a_panic_ends_ranks_that_compute() {
    let job = launch::run(3, "panic while others compute");
    job.must_fail_with(
        "rank 1 panicked: the loss is not a number; the job ends",
        SECONDS,
    );
}

fn a_panic_that_is_caught_ends_nothing() {
    let job = launch::run(3, "panic that is caught");
    job.must_succeed();
    assert_eq!(job.marked("went on ").len(), 3, "{}", job.output);
}

fn a_killed_rank_ends_the_job() {
    let job = launch::run(3, "killed");
    assert!(
        !job.success && job.took < SECONDS,
        "{:?}: {}",
        job.took,
        job.output
    );
}

fn a_rank_that_hangs_is_named_by_all() {
    let job = launch::run(3, "hang");
    job.must_fail_with(
        "in all_reduce #2 `step 7` of 10 f32, mean for rank 1;",
        SECONDS,
    );
    for rank in [0, 2] {
        assert_eq!(
            job.marked(&format!("rank {rank}: rank")).len(),
            1,
            "{}",
            job.output
        );
    }
}

fn a_stopped_process_is_named() {
    let job = launch::run(3, "stopped");
    job.must_fail_with(
        "in all_reduce #2 `large` of 10000000 f32, mean for rank",
        SECONDS,
    );
    // One of the others may be a chunk behind and be waited for as well.
    let ranks = ["for rank 1;", "for ranks 0, 1;", "for ranks 1, 2;"];
    assert!(
        ranks.iter().any(|ranks| job.output.contains(ranks)),
        "{}",
        job.output
    );
    assert!(job.took > programs::DEADLINE);
}

fn a_rank_that_leaves_is_named_at_once() {
    let job = launch::run(3, "leave");
    job.must_fail_with("rank 1 left after 2 collectives, but rank", SECONDS);
    assert!(
        job.output.contains("calls barrier #2 `step 1`"),
        "{}",
        job.output
    );
}

fn an_error_of_one_rank_ends_the_job() {
    launch::run(3, "error").must_fail_with("rank 1 gave up: no such file; the job ends", SECONDS);
}

fn ranks_that_differ_get_both_sides() {
    let job = launch::run(3, "mismatch");
    job.must_fail_with("all_reduce #1 `bucket 3` of 11 bf16, mean", SECONDS);
    assert!(
        job.output
            .contains("all_reduce #1 `bucket 3` of 10 bf16, mean"),
        "{}",
        job.output
    );
    for rank in 0..3 {
        assert_eq!(
            job.marked(&format!("rank {rank}: ranks differ: rank"))
                .len(),
            1,
            "{}",
            job.output
        );
    }
}

fn a_skipped_collective_is_found_by_its_label() {
    let job = launch::run(2, "skip");
    job.must_fail_with("#4 `gradients, step 3`", SECONDS);
    assert!(
        job.output.contains("#4 `gradients, step 4`"),
        "{}",
        job.output
    );
}

fn a_rank_that_gives_up_says_why() {
    launch::run(3, "abort").must_fail_with("rank 1 gave up: the disk is full", SECONDS);
}

fn options_that_differ_are_refused() {
    let job = launch::run(2, "options differ");
    job.must_fail_with("group options: rank", SECONDS);
    assert!(job.output.contains("deadline: 101s"), "{}", job.output);
}

fn mpi_starts_once() {
    let job = launch::run(2, "twice");
    job.must_succeed();
    assert_eq!(
        job.marked("second: MPI: it was started before in this process")
            .len(),
        2
    );
}

fn a_rank_may_stay_for_longer_than_the_deadline() {
    let job = launch::run(3, "afterwards");
    job.must_succeed();
    assert_eq!(job.marked("left ").len(), 3, "{}", job.output);
}
