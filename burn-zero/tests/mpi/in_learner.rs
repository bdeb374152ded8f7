//! A Learner, on processes and on threads.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::lr_scheduler::constant::ConstantLr;
use burn::optim::AdamWConfig;
use burn_flex::Flex;
use burn_zero::{MpiGroup, ProcessGroup, Sharded, Sharding, Stage, ZeroOptimizer, ZeroStrategy};

use crate::learner::{Outcome, Setup, train};
use crate::model::{Model, bits, rows};

type B = Sharded<Autodiff<Flex>>;

/// What a training came to, and what it showed, logged and wrote.
pub struct Trained {
    pub trained: String,
    pub saw: String,
}

pub fn on_threads(ranks: usize) -> Trained {
    Trained::of(&run(Err(ranks)))
}

/// The program of each process.
pub fn learner(group: MpiGroup) {
    let rank = group.rank();
    let outcome = run(Ok(group));
    let trained = Trained::of(&outcome);
    println!("trained {}", trained.trained);
    let [shown, logged] = outcome.watch.lines();
    if rank == 0 || !shown.is_empty() || !logged.is_empty() || outcome.directory.is_recorded(1) {
        println!("saw {}", trained.saw);
    }
}

/// On processes, or on so many threads.
fn run(ranks: Result<MpiGroup, usize>) -> Outcome<B> {
    let strategy = match ranks {
        Ok(group) => ZeroStrategy::process(Arc::new(group)).sharing_items(),
        Err(ranks) => ZeroStrategy::threads(ranks),
    };
    let adam = AdamWConfig::new().init();
    let optimizer = ZeroOptimizer::in_learner(adam, Sharding::stage(Stage::Gradients));
    let mut setup = Setup::new(rows(0, 21), 2);
    setup.valid = rows(1000, 1017);
    let scheduler = ConstantLr::new(0.1);
    train(
        Model::new(),
        optimizer,
        scheduler,
        setup,
        Some(strategy.into()),
    )
}

impl Trained {
    fn of(outcome: &Outcome<B>) -> Self {
        Self {
            trained: digest(bits(&outcome.model)),
            saw: format!(
                "{} recorded {} {}",
                digest(outcome.watch.lines()),
                outcome.directory.is_recorded(1),
                outcome.directory.is_recorded(2)
            ),
        }
    }
}

fn digest(value: impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:x}", hasher.finish())
}
