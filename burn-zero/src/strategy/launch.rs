//! Starts the ranks of this program: one, or one thread each.

use std::sync::Arc;
use std::thread;

use burn::tensor::Device;
use burn::train::{
    Learner, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader,
    TrainingBackend, TrainingComponents, TrainingModel, ValidLoader,
};
use burn_decorator::device::device_of;
use burn_decorator::ranks::copy_for_rank;

use super::data::split;
use super::items::Items;
use super::rank::{Checkpoints, Job, Rank, Rank0, Trained};
use super::{Loaders, Ranks, ZeroStrategy};
use crate::ZeroError;
use crate::group::{ProcessGroup, SingleRank, ThreadGroup};

pub(super) type Fitted<LC> = (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>);

/// What all ranks share, what rank 0 alone has, the Learner, and the data to train on.
type Start<LC> = (Job<LC>, Rank0<LC>, Learner<LC>, TrainLoader<LC>);

impl<LC: LearningComponentsTypes + 'static> ZeroStrategy<LC> {
    /// # Errors
    ///
    /// Those of the strategy, of sharding and of the group.
    pub(super) fn try_fit(
        &self,
        components: TrainingComponents<LC>,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        first_epoch: usize,
    ) -> Result<Fitted<LC>, ZeroError> {
        if let Some(steps) = components.grad_accumulation {
            return Err(ZeroError::Strategy(format!(
                "the Learner accumulates gradients itself (`grads_accumulation({steps})`), which knows nothing of ranks: use \
                 burn-accum's `MultiSteps` around the ZeroOptimizer"
            )));
        }
        let job = Job {
            valid,
            interrupter: components.interrupter,
            store: components.event_store,
            first_epoch,
            last_epoch: components.num_epochs,
            uneven: self.uneven,
            loaders: self.loaders,
        };
        let rank_0 = Rank0 {
            processor: components.event_processor,
            checkpoints: components.checkpointer.map(Checkpoints::new),
            early_stopping: components.early_stopping,
        };
        let ranks = match &self.ranks {
            Ranks::Threads { world_size, .. } => *world_size,
            Ranks::Process(_) => 1,
        };
        let devices = self.devices.clone();
        let device = || device_of::<TrainingBackend<LC>, _>(&learner.model());
        let mut devices = devices.unwrap_or_else(|| vec![device(); ranks]);
        if devices.len() != ranks {
            let named = devices.len();
            return Err(ZeroError::Strategy(format!(
                "there are {named} devices for {ranks} ranks: name one for each"
            )));
        }
        let start = (job, rank_0, learner, train);
        match &self.ranks {
            Ranks::Threads { world_size: 1, .. } => {
                self.fit_process(start, Arc::new(SingleRank::new()), devices.remove(0))
            }
            Ranks::Threads { options, .. } => {
                let groups = ThreadGroup::new(ranks, options.clone())?;
                self.fit_threads(start, groups, devices)
            }
            Ranks::Process(group) => self.fit_process(start, group.clone(), devices.remove(0)),
        }
    }

    fn fit_process(
        &self,
        (job, rank_0, learner, train): Start<LC>,
        group: Arc<dyn ProcessGroup>,
        device: Device<TrainingBackend<LC>>,
    ) -> Result<Fitted<LC>, ZeroError> {
        let (ranks, own) = (group.world_size(), group.rank());
        let train = match self.loaders {
            Loaders::Whole => split(&train, ranks, self.uneven)?.swap_remove(own),
            Loaders::TrainSplit | Loaders::Split => train,
        };
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
        let processor = shown.or(silent).expect("a process has one processor");
        Ok((model, processor))
    }

    /// Rank 0 stays on this thread, where the user's renderer and handles are.
    fn fit_threads(
        &self,
        (job, rank_0, learner, train): Start<LC>,
        groups: Vec<ThreadGroup>,
        devices: Vec<Device<TrainingBackend<LC>>>,
    ) -> Result<Fitted<LC>, ZeroError> {
        let (ranks, loaders) = (groups.len(), self.loaders);
        if loaders != Loaders::Whole {
            return Err(ZeroError::Strategy(format!(
                "ranks that are threads share one loader, which the strategy cuts: `Loaders::{loaders:?}` is for \
                 `ZeroStrategy::process`, where each process loads its own part"
            )));
        }
        let parts = split(&train, ranks, self.uneven)?;
        let items = Items::between_threads(ranks).zip(Items::between_threads(ranks));
        let mut rank_0 = Some(rank_0);
        let (first, watch) = (groups[0].clone(), groups[0].watch());
        let members = groups.into_iter().zip(devices).zip(parts).zip(items);
        let mut runs = members.map(|(((group, device), train), (train_items, valid_items))| {
            let rank = Rank {
                group: Arc::new(group.clone()),
                device,
                learner: learner.clone(),
                train,
                train_items,
                valid_items,
                job: job.clone(),
                rank_0: rank_0.take(),
            };
            || guarded(group, rank)
        });
        let run_0 = runs.next();
        let others: Vec<_> = runs.collect();
        drop(learner);
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
            let mut results: Vec<_> = run_0.into_iter().map(|run| run()).collect();
            let others = others.into_iter();
            results.extend(others.map(|rank| rank.join().expect("panics are caught in the rank")));
            results
        });
        result_of_all::<LC>(results, &first)
    }
}

/// Runs a rank; if it fails, the group is aborted.
fn guarded<LC: LearningComponentsTypes + 'static>(
    group: ThreadGroup,
    mut rank: Rank<LC>,
) -> Result<Trained<LC>, ZeroError> {
    let member = group.clone();
    let run = |_| {
        // Rank 0 takes its first step after collectives of all ranks, so its Learner does not change during the copy.
        if rank.rank_0.is_none() {
            rank.learner = copy_for_rank(|| rank.learner.clone());
        }
        rank.run()
    };
    let result = group.guard(run).flatten();
    result.inspect_err(|error| member.abort(&error.to_string()))
}

/// The model of rank 0, or the error: a failure of one rank is a fault of the group on the others.
fn result_of_all<LC: LearningComponentsTypes>(
    results: Vec<Result<Trained<LC>, ZeroError>>,
    group: &ThreadGroup,
) -> Result<Fitted<LC>, ZeroError> {
    let is_fault = |error: &ZeroError| matches!(error, ZeroError::Group(_));
    let errors = || results.iter().filter_map(|result| result.as_ref().err());
    if let Some(error) = errors().find(|error| !is_fault(error)) {
        return Err(error.clone());
    }
    if errors().next().is_some() {
        // Fails with the fault of the group.
        group.barrier("end of the training")?;
    }
    let (model, processor) = results.into_iter().next().expect("there is a rank 0")?;
    Ok((model, processor.expect("rank 0 returns its processor")))
}
