//! Starts the ranks of this program: one, or one thread each.

use std::sync::Arc;
use std::thread;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Bool, Device, Int, Tensor, backend::Backend};
use burn::train::{
    Learner, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader,
    TrainingBackend, TrainingComponents, TrainingModel, ValidLoader,
};
use burn_decorator::ranks::copy_for_rank;

use super::checkpoints::Checkpoints;
use super::items::Items;
use super::rank::{Job, Rank, Rank0, Trained};
use super::split::split;
use super::{Ranks, StrategyError, ZeroStrategy};
use crate::ZeroError;
use crate::group::{ProcessGroup, SingleRank, ThreadGroup};

/// The start of a training.
pub(super) struct Start<LC: LearningComponentsTypes> {
    pub(super) components: TrainingComponents<LC>,
    pub(super) learner: Learner<LC>,
    pub(super) train: TrainLoader<LC>,
    pub(super) valid: ValidLoader<LC>,
    pub(super) epoch: usize,
}

pub(super) type Fitted<LC> = (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>);

impl<LC: LearningComponentsTypes + 'static> ZeroStrategy<LC> {
    /// # Errors
    ///
    /// Those of the strategy, of sharding and of the group.
    pub(super) fn try_fit(&self, start: Start<LC>) -> Result<Fitted<LC>, ZeroError> {
        if let Some(steps) = start.components.grad_accumulation {
            return Err(StrategyError::SecondAccumulation { steps }.into());
        }
        let device = device_of::<TrainingBackend<LC>, _>(&start.learner.model());
        match &self.ranks {
            Ranks::Threads { world_size: 0, .. } => Err(ZeroError::InvalidSetting {
                setting: "world_size",
                value: "0".to_owned(),
                expected: "at least 1",
            }),
            Ranks::Threads {
                world_size: 1,
                devices,
                ..
            } => {
                let named = devices.as_ref().and_then(|devices| devices.first());
                let device = named.cloned().unwrap_or(device);
                self.fit_process(start, Arc::new(SingleRank::new()), device)
            }
            Ranks::Threads {
                world_size,
                options,
                devices,
            } => {
                let devices = devices.clone();
                let devices = devices.unwrap_or_else(|| vec![device; *world_size]);
                if devices.len() != *world_size {
                    let (devices, ranks) = (devices.len(), *world_size);
                    return Err(StrategyError::Devices { devices, ranks }.into());
                }
                let groups = ThreadGroup::new(*world_size, options.clone())?;
                self.fit_threads(start, groups, devices)
            }
            Ranks::Process {
                group,
                device: named,
            } => {
                let device = named.clone().unwrap_or(device);
                self.fit_process(start, group.clone(), device)
            }
        }
    }

    fn fit_process(
        &self,
        start: Start<LC>,
        group: Arc<dyn ProcessGroup>,
        device: Device<TrainingBackend<LC>>,
    ) -> Result<Fitted<LC>, ZeroError> {
        let (ranks, own) = (group.world_size(), group.rank());
        let train = match self.loaders.split_training() {
            true => start.train.clone(),
            false => split(&start.train, ranks, self.uneven)?.swap_remove(own),
        };
        let (job, rank_0, learner) = self.divide(start);
        // The silent parts are kept alive, because they own the renderer.
        let (rank_0, silent) = match own {
            0 => (Some(rank_0), None),
            _ => (None, Some(rank_0.processor)),
        };
        let rank = Rank {
            group,
            device,
            learner,
            train,
            train_items: Items::of_process(self.train_format),
            valid_items: Items::of_process(self.valid_format),
            job,
            rank_0,
        };
        let (model, shown) = rank.run()?;
        match shown.or(silent) {
            Some(processor) => Ok((model, processor)),
            None => unreachable!("a process has one processor"),
        }
    }

    /// Rank 0 stays on this thread, where the user's renderer and handles are.
    fn fit_threads(
        &self,
        start: Start<LC>,
        groups: Vec<ThreadGroup>,
        devices: Vec<Device<TrainingBackend<LC>>>,
    ) -> Result<Fitted<LC>, ZeroError> {
        let (ranks, loaders) = (groups.len(), self.loaders);
        if loaders.split_training() {
            return Err(StrategyError::OneLoader { loaders }.into());
        }
        let mut parts = split(&start.train, ranks, self.uneven)?.into_iter();
        let mut train_items = Items::between_threads(ranks).into_iter();
        let mut valid_items = Items::between_threads(ranks).into_iter();
        let (job, rank_0, learner) = self.divide(start);
        let mut rank_0 = Some(rank_0);
        let (first, watch) = (groups[0].clone(), groups[0].watch());
        let members = groups.into_iter().zip(devices);
        let mut runs: Vec<_> = members
            .filter_map(|(group, device)| {
                let train = parts.next()?;
                let (train_items, valid_items) = (train_items.next()?, valid_items.next()?);
                let (job, rank_0) = (job.clone(), rank_0.take());
                let learner = learner.clone();
                Some(move || {
                    guarded(group, |group| {
                        // Rank 0 takes its first step after collectives of all ranks, so its Learner does not change during the copy.
                        let learner = match rank_0 {
                            Some(_) => learner,
                            None => {
                                let own = copy_for_rank(|| learner.clone());
                                drop(learner);
                                own
                            }
                        };
                        let rank = Rank {
                            group: Arc::new(group),
                            device,
                            learner,
                            train,
                            train_items,
                            valid_items,
                            job,
                            rank_0,
                        };
                        rank.run()
                    })
                })
            })
            .collect();
        drop(learner);
        let others = runs.split_off(1);
        let results = thread::scope(|scope| {
            thread::Builder::new()
                .name("watch over ranks".to_owned())
                .spawn_scoped(scope, || watch.run())
                .expect("the system starts a thread");
            let start = |(rank, run)| {
                thread::Builder::new()
                    .name(format!("rank {rank}"))
                    .spawn_scoped(scope, run)
                    .expect("the system starts a thread")
            };
            let others: Vec<_> = (1..).zip(others).map(start).collect();
            let mut results: Vec<_> = runs.into_iter().map(|run| run()).collect();
            let others = others.into_iter();
            results.extend(others.map(|rank| rank.join().expect("panics are caught in the rank")));
            results
        });
        result_of_all::<LC>(results, &first)
    }

    /// Splits the start into what all ranks share, what rank 0 alone has, and the Learner.
    fn divide(&self, start: Start<LC>) -> (Job<LC>, Rank0<LC>, Learner<LC>) {
        let components = start.components;
        let job = Job {
            valid: start.valid,
            interrupter: components.interrupter,
            store: components.event_store,
            first_epoch: start.epoch,
            last_epoch: components.num_epochs,
            uneven: self.uneven,
            loaders: self.loaders,
        };
        let rank_0 = Rank0 {
            processor: components.event_processor,
            checkpoints: components.checkpointer.map(Checkpoints::new),
            early_stopping: components.early_stopping,
        };
        (job, rank_0, start.learner)
    }
}

/// Runs a rank; if it fails, the group is aborted.
fn guarded<R>(
    group: ThreadGroup,
    run: impl FnOnce(ThreadGroup) -> Result<R, ZeroError>,
) -> Result<R, ZeroError> {
    let member = group.clone();
    let result = group.guard(run).flatten();
    result.inspect_err(|error| member.abort(&error.to_string()))
}

/// The model of rank 0, or the error: a failure of one rank is a fault of the group on the others.
fn result_of_all<LC: LearningComponentsTypes>(
    results: Vec<Result<Trained<LC>, ZeroError>>,
    group: &ThreadGroup,
) -> Result<Fitted<LC>, ZeroError> {
    let cause = |result: &Result<_, ZeroError>| match result {
        Err(error) if !matches!(error, ZeroError::Group(_)) => Some(error.clone()),
        _ => None,
    };
    if let Some(error) = results.iter().find_map(cause) {
        return Err(error);
    }
    if results.iter().any(Result::is_err) {
        // Fails with the fault of the group.
        group.barrier("end of the training")?;
    }
    match results.into_iter().next() {
        Some(Ok((model, Some(processor)))) => Ok((model, processor)),
        Some(Err(error)) => Err(error),
        _ => unreachable!("rank 0 returns what it was given"),
    }
}

/// The device of the first parameter, the default of Burn's Learner. Unlike `Module::devices` it does not initialise lazy parameters,
/// which would get other values in a copy of the model. (Duplicated in burn-accum's strategy, because it is too small for a crate.)
fn device_of<B: Backend, M: Module<B>>(module: &M) -> Device<B> {
    let mut first = First::<B>(None);
    module.visit(&mut first);
    first.0.unwrap_or_default()
}

struct First<B: Backend>(Option<Device<B>>);

impl<B: Backend> ModuleVisitor<B> for First<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.get_or_insert_with(|| param.lazy_device());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.0.get_or_insert_with(|| param.lazy_device());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.0.get_or_insert_with(|| param.lazy_device());
    }
}
