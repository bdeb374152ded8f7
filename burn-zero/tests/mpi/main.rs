//! What ranks that are processes promise: each test starts this program again under the launcher,
//! as many times as it has ranks, with the name of a program of `programs`.
//!
//! `MPIRUN` names the launcher, `mpirun` by default. An argument selects tests by a part of their
//! name.

#[path = "../strategy/carried.rs"]
mod carried;
mod in_learner;
mod launch;
#[allow(dead_code)]
#[path = "../../../burn-accum/tests/strategy/learner.rs"]
mod learner;
#[allow(dead_code)]
#[path = "../../../burn-accum/tests/strategy/model.rs"]
mod model;
#[allow(dead_code, reason = "the laws on threads use the rest")]
#[path = "../sharding/support.rs"]
mod nets;
mod programs;
mod resumed;
#[path = "../support/mod.rs"]
mod support;
mod tests;
mod training;
#[allow(dead_code)]
#[path = "../strategy/variants.rs"]
mod variants;
#[allow(dead_code)]
#[path = "../../../burn-accum/tests/strategy/watch.rs"]
mod watch;

fn main() {
    if let Ok(program) = std::env::var(launch::PROGRAM) {
        programs::run(&program);
        return;
    }
    let filter = std::env::args()
        .skip(1)
        .find(|argument| !argument.starts_with('-'))
        .unwrap_or_default();
    let mut failed = Vec::new();
    for (name, test) in tests::ALL.iter().filter(|(name, _)| name.contains(&filter)) {
        let start = std::time::Instant::now();
        let result = std::panic::catch_unwind(test);
        let text = if result.is_ok() { "ok" } else { "FAILED" };
        println!(
            "test {name} ... {text} ({:.1} s)",
            start.elapsed().as_secs_f32()
        );
        if result.is_err() {
            failed.push(name);
        }
    }
    assert!(failed.is_empty(), "failed: {failed:?}");
}
