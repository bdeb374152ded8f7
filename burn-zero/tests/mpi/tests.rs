//! Jobs and what they must do.

use std::time::{Duration, SystemTime};

use burn::optim::AdamWConfig;

use crate::in_learner::Layers;
use crate::{launch, nets, training};

pub const ALL: &[launch::Test] = &[
    (
        "a_learner_trains_on_processes_as_on_threads",
        a_learner_trains_on_processes_as_on_threads,
    ),
    (
        "training_is_that_on_threads_bit_for_bit",
        training_is_that_on_threads_bit_for_bit,
    ),
    (
        "a_record_is_carried_over_any_number_of_processes",
        a_record_is_carried_over_any_number_of_processes,
    ),
    (
        "a_training_with_dropout_is_broken_off_and_resumed",
        crate::resumed::a_training_with_dropout_is_broken_off_and_resumed,
    ),
    (
        "a_rank_may_be_killed_while_a_record_is_saved",
        a_rank_may_be_killed_while_a_record_is_saved,
    ),
    (
        "a_rank_killed_in_backward_or_in_a_gather_ends_the_job",
        a_rank_killed_in_backward_or_in_a_gather_ends_the_job,
    ),
    (
        "a_step_that_differs_is_named_with_both_sides",
        a_step_that_differs_is_named_with_both_sides,
    ),
];

/// "In seconds": starting and ending a job included, on a loaded machine.
const SECONDS: Duration = Duration::from_secs(12);

fn training_is_that_on_threads_bit_for_bit() {
    let plain = nets::train_plain(AdamWConfig::new().init(), training::STEPS);
    for ranks in 1..=4 {
        let job = launch::run(ranks, "train");
        job.must_succeed();
        let mut found = job.marked("trained ");
        found.sort_unstable();
        let on_threads = nets::on_each_rank(ranks, |group| training::digests(&group).unwrap());
        let mut expected: Vec<_> = on_threads.iter().flatten().cloned().collect();
        expected.sort_unstable();
        assert_eq!(found, expected, "{ranks} ranks");

        let sharding = nets::small_buckets(burn_zero::Stage::Gradients);
        let adam = || AdamWConfig::new().init();
        let sharded = nets::train_sharded(ranks, &sharding, adam, training::STEPS);
        let distance = nets::distance(&plain, &sharded);
        assert!(distance < 2e-5, "{ranks} ranks: {distance}");
    }
}

fn a_record_is_carried_over_any_number_of_processes() {
    let dirs = [(); 5].map(|()| tempfile::tempdir().unwrap());
    let paths = dirs.each_ref().map(tempfile::TempDir::path);
    for (ranks, pair) in [4, 1, 3, 4].into_iter().zip(paths.windows(2)) {
        let program = format!("carry {} {}", pair[0].display(), pair[1].display());
        launch::run(ranks, &program).must_succeed();
    }
    let first = nets::contents(paths[1]);
    assert!(first.0.keys().any(|name| name.ends_with("moment_2")));
    for path in &paths[2..] {
        assert!(first == nets::contents(path), "{}", path.display());
    }
}

fn a_rank_may_be_killed_while_a_record_is_saved() {
    const RANKS: usize = 3;
    let dir = tempfile::tempdir().unwrap();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let mut random = now.unwrap().as_nanos() as u64 | 1;
    println!("seed {random}");
    let mut last = 0;
    for round in 0..6 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let (victim, after_us) = (random as usize % RANKS, random % 90_000);
        let program = format!(
            "save until killed {victim} {after_us} {}",
            dir.path().display()
        );
        let job = launch::run(RANKS, &program);
        let told = format!("round {round}, seed {random}: {}", job.output);
        assert!(!job.success && job.took < SECONDS, "{:?}: {told}", job.took);

        // What was said to be saved is; more may be, of which nobody could tell any more.
        let said = job.marked("saved ").into_iter();
        let said = said.map(|step| step.parse().unwrap()).fold(last, u64::max);
        let found = training::loaded(dir.path());
        assert!(
            found.step > last && found.step >= said,
            "{said} saved, {} found: {told}",
            found.step
        );
        assert_eq!(
            found.weights,
            training::weights_after(RANKS, found.step),
            "{told}"
        );
        last = found.step;
    }
}

fn a_rank_killed_in_backward_or_in_a_gather_ends_the_job() {
    for program in ["killed in backward", "killed in a gather"] {
        let job = launch::run(3, program);
        assert!(
            !job.success && job.took < SECONDS,
            "{:?}: {}",
            job.took,
            job.output
        );
        assert_eq!(job.marked("step 1 of rank").len(), 3, "{}", job.output);
        assert!(!job.output.contains("step 2 of rank"), "{}", job.output);
    }
}

fn a_learner_trains_on_processes_as_on_threads() {
    for layers in Layers::ALL {
        for ranks in [2, 3] {
            let ended = launch::run(ranks, &layers.program());
            ended.must_succeed();
            let threads = layers.on_threads(ranks);
            let told = format!("{layers:?}, {ranks} ranks: {}", ended.output);
            let mut trained = ended.marked("trained ");
            trained.retain(|trained| !trained.is_empty());
            let have_model = match layers {
                Layers::Parameters => 1,
                _ => ranks,
            };
            assert_eq!(trained, vec![&*threads.trained; have_model], "{told}");
            // Rank 0 alone shows and writes.
            assert_eq!(ended.marked("saw "), [&*threads.saw], "{told}");
        }
    }
}

/// As on threads: `sharding::settings`.
fn a_step_that_differs_is_named_with_both_sides() {
    for (program, sides) in [(
        "other learning rate",
        ["step 4, lr 0.05 (", "step 4, lr 0.1 ("],
    )] {
        let job = launch::run(2, program);
        for side in sides {
            job.must_fail_with(side, SECONDS);
        }
    }
}
