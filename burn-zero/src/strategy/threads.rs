//! Ranks as threads: rank 0 stays on the thread that launched the training, where the user's renderer and records are.

use std::sync::Arc;
use std::thread;

use burn::train::{Learner, LearningComponentsTypes};

use super::fit::{Fitted, Start};
use super::items::Items;
use super::rank::{Epochs, Front, Rank, Trained};
use super::records::Records;
use super::split::split;
use super::{MakeLearner, Ranks, StrategyError, ZeroStrategy};
use crate::ZeroError;
use crate::group::{ProcessGroup, ThreadGroup};

/// What shares its state between clones: seams between crates are values, and the name of a type is one.
const SHARING: [&str; 4] = [
    "::MultiSteps<",
    "::PerUpdate<",
    "::ScaledOptimizer<",
    "::ClipGlobalNorm<",
];

impl<LC: LearningComponentsTypes> ZeroStrategy<LC> {
    /// # Errors
    ///
    /// Those of the strategy, of sharding and of the group.
    pub(super) fn fit_threads(&self, start: Start<LC>) -> Result<Fitted<LC>, ZeroError> {
        let Ranks::Threads {
            world_size: ranks,
            options,
            devices,
            learners,
        } = &self.ranks
        else {
            unreachable!("asked only of threads");
        };
        let ranks = *ranks;
        let loaders = self.loaders;
        if loaders.split_training() {
            return Err(StrategyError::OneLoader { loaders }.into());
        }
        let devices = match devices {
            Some(devices) => devices.clone(),
            None => vec![start.device(); ranks],
        };
        if devices.len() != ranks {
            let devices = devices.len();
            return Err(StrategyError::Devices { devices, ranks }.into());
        }
        let sources = sources(&start, ranks, learners.as_ref())?;
        let groups = ThreadGroup::new(ranks, options.clone())?;
        let (witness, watch) = (groups[0].clone(), groups[0].watch());
        let parts = split(&start.train, ranks, self.uneven)?;
        let train_items = Items::between_threads(ranks);
        let valid_items = Items::between_threads(ranks);
        let components = start.components;
        let mut front = Some(Front {
            processor: components.event_processor,
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
        });
        let epochs = Epochs {
            first: start.epoch,
            last: components.num_epochs,
            uneven: self.uneven,
            loaders,
        };

        let seats = groups.into_iter().zip(devices).zip(parts);
        let items = train_items.into_iter().zip(valid_items);
        let rank_starts = seats.zip(items).map(|(((group, device), train), items)| {
            let (valid, interrupter) = (start.valid.clone(), components.interrupter.clone());
            let (store, epoch_end) = (components.event_store.clone(), self.epoch_end.clone());
            let front = front.take();
            move |source: Source<LC>| {
                guarded(group, |group| {
                    let rank = Rank {
                        group: Arc::new(group),
                        device,
                        learner: source.learner(),
                        train,
                        valid,
                        train_items: items.0,
                        valid_items: items.1,
                        interrupter,
                        store,
                        epochs,
                        epoch_end,
                        front,
                    };
                    rank.run()
                })
            }
        });
        let mut rank_starts = rank_starts.collect::<Vec<_>>().into_iter();
        let Some(first) = rank_starts.next() else {
            unreachable!("there are at least two ranks");
        };
        let results = thread::scope(|scope| {
            thread::Builder::new()
                .name("watch over ranks".to_owned())
                .spawn_scoped(scope, || watch.run())
                .expect("the system starts a thread");
            let others = rank_starts.zip(sources).enumerate();
            let others: Vec<_> = others
                .map(|(index, (run, source))| {
                    thread::Builder::new()
                        .name(format!("rank {}", index + 1))
                        .spawn_scoped(scope, move || run(source))
                        .expect("the system starts a thread")
                })
                .collect();
            let mut results = vec![first(Source::Given(Box::new(start.learner)))];
            let others = others.into_iter();
            results.extend(others.map(|rank| rank.join().expect("panics are caught in the rank")));
            results
        });
        judge::<LC>(results, &witness)
    }
}

/// Where a rank's learner comes from.
enum Source<LC: LearningComponentsTypes> {
    Given(Box<Learner<LC>>),
    Make(MakeLearner<LC>, Option<Records<LC>>),
}

fn sources<LC: LearningComponentsTypes>(
    start: &Start<LC>,
    ranks: usize,
    make: Option<&MakeLearner<LC>>,
) -> Result<Vec<Source<LC>>, StrategyError> {
    let Some(make) = make else {
        let parts = [
            core::any::type_name::<LC::Optimizer>(),
            core::any::type_name::<LC::LrScheduler>(),
        ];
        let shares = |part: &&str| SHARING.iter().any(|name| part.contains(name));
        if let Some(part) = parts.into_iter().find(shares) {
            return Err(StrategyError::SharedByClones { part });
        }
        let clone = |_| Source::Given(Box::new(start.learner.clone()));
        return Ok((1..ranks).map(clone).collect());
    };
    let resumes = start.components.checkpoint.is_some();
    let make = |_| {
        let records = resumes.then(|| Records::of(&start.learner, &start.components.event_store));
        Source::Make(make.clone(), records)
    };
    Ok((1..ranks).map(make).collect())
}

impl<LC: LearningComponentsTypes> Source<LC> {
    /// On the thread of the rank.
    fn learner(self) -> Learner<LC> {
        match self {
            Self::Given(learner) => *learner,
            Self::Make(make, records) => {
                let mut learner = make();
                if let Some(records) = records {
                    records.load_into(&mut learner);
                }
                learner
            }
        }
    }
}

/// Runs a rank; whatever ends it ends the others.
fn guarded<R>(
    group: ThreadGroup,
    run: impl FnOnce(ThreadGroup) -> Result<R, ZeroError>,
) -> Result<R, ZeroError> {
    let member = group.clone();
    group
        .guard(run)
        .flatten()
        .inspect_err(|error| member.abort(&error.to_string()))
}

/// The model of rank 0, or why there is none: what ended one rank comes to the others as a fault of the group.
fn judge<LC: LearningComponentsTypes>(
    results: Vec<Result<Trained<LC>, ZeroError>>,
    witness: &ThreadGroup,
) -> Result<Fitted<LC>, ZeroError> {
    let own = |result: &Result<_, ZeroError>| match result {
        Err(error) if !matches!(error, ZeroError::Group(_)) => Some(error.clone()),
        _ => None,
    };
    if let Some(error) = results.iter().find_map(own) {
        return Err(error);
    }
    if results.iter().any(Result::is_err) {
        witness.barrier("end of the training")?;
    }
    match results.into_iter().next() {
        Some(Ok((model, Some(processor)))) => Ok((model, processor)),
        Some(Err(error)) => Err(error),
        _ => unreachable!("rank 0 returns what it was given"),
    }
}
