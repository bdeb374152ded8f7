//! What trainings on ranks that are processes promise: see burn-ranks's `launch`.

#[path = "../strategy/carried.rs"]
mod carried;
mod in_learner;
#[allow(dead_code, reason = "the tests of groups use the rest")]
#[path = "../../../burn-ranks/tests/mpi/launch.rs"]
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
mod tests;
mod training;
#[allow(dead_code)]
#[path = "../strategy/variants.rs"]
mod variants;
#[allow(dead_code)]
#[path = "../../../burn-accum/tests/strategy/watch.rs"]
mod watch;

fn main() {
    launch::main(tests::ALL, programs::run);
}
