//! Starts the ranks of this program: one, or one thread each.

use std::iter::repeat_n;
use std::sync::Arc;

use burn::tensor::Device;
use burn::train::{
    Learner, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader,
    TrainingBackend, TrainingComponents, TrainingModel, ValidLoader,
};
use burn_decorator::device::device_of;
use burn_decorator::ranks::copy_for_rank;
use burn_ranks::{ProcessGroup, RanksError, SingleRank, ThreadGroup};

use super::data::split;
use super::driver::{Counting, Position};
use super::items::Items;
use super::rank::{Checkpoints, Rank, Rank0, Run, Trained};
use super::{Ranks, UpdateStrategy};
use crate::{EpochOfRank, EpochTail, UpdateError};

const CARRIED_OVER_RANKS: &str = "`EpochTail::Carry` with records over several ranks: a window that is open at the end of an epoch holds \
                                  each rank's own gradients, which the record of rank 0 does not have; use `EpochTail::Apply` or \
                                  `EpochTail::Drop`, or train without `with_file_checkpointer`";

pub(super) type Fitted<LC> = (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>);

impl<LC: LearningComponentsTypes + 'static> UpdateStrategy<LC> {
    /// # Errors
    ///
    /// Those of the strategy, of the optimizer and of the group.
    pub(super) fn try_fit(
        &self,
        components: TrainingComponents<LC>,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        first: usize,
    ) -> Result<Fitted<LC>, UpdateError> {
        let threads = self.threads_of_ranks()?;
        let groups = self.groups(&threads);
        let world_size = groups[0].world_size();
        self.driver.check(&components, world_size)?;
        if world_size > 1 && self.tail == EpochTail::Carry && components.checkpointer.is_some() {
            return Err(UpdateError::Strategy(CARRIED_OVER_RANKS.to_owned()));
        }
        // Without a resumption the update may know the place of another training: that of a clone,
        // or of a record that was loaded for its state.
        let resumed_at = match components.checkpoint {
            Some(_) => self.driver.position(),
            None => None,
        };
        self.check_resumption(components.checkpoint, resumed_at)?;
        let position = resumed_at.unwrap_or_else(|| Position::epoch(first));
        let devices = self.devices_of(&learner, groups.len())?;
        let parts = self.training_parts(&train, world_size, position.epoch);
        let run = self.run_of(&components, first, resumed_at);
        let mut rank_0 = Some(Rank0 {
            processor: components.event_processor,
            checkpoints: components.checkpointer.map(Checkpoints::new),
            early_stopping: components.early_stopping,
        });
        let train_items = Items::of_ranks(groups.len(), self.train_format);
        let items = train_items.zip(Items::of_ranks(groups.len(), self.valid_format));
        let learners = repeat_n(learner, groups.len());
        let members = groups.into_iter().zip(devices).zip(items).zip(learners);
        let ranks = members.map(|(((group, device), (train_items, valid_items)), learner)| {
            // In a box: it has a model by value.
            Box::new(Rank {
                device,
                learner,
                train: parts[group.rank()].clone(),
                valid: valid.clone(),
                train_items,
                valid_items,
                run: run.clone(),
                rank_0: rank_0.take_if(|_| group.rank() == 0),
                group,
                position,
                steps: 0,
            })
        });
        let ranks: Vec<_> = ranks.collect();
        let trained = match threads.first().cloned() {
            Some(first) => result_of_all(run_threads(ranks, threads), &first),
            None => {
                let run = |rank: Box<Rank<LC>>| {
                    let driver = rank.driver();
                    rank.run(&*driver)
                };
                ranks.into_iter().map(run).collect()
            }
        };
        let rank = trained?.into_iter().next();
        let (model, shown) = rank.expect("there is one rank or more");
        // A process that is not rank 0 keeps its event processor, because that owns the renderer.
        let silent = rank_0.map(|silent| silent.processor);
        let processor = shown.or(silent).expect("a process has one processor");
        Ok((model, processor))
    }

    /// The groups of the ranks, where they are several threads of this program.
    ///
    /// # Errors
    ///
    /// Those of the group.
    fn threads_of_ranks(&self) -> Result<Vec<ThreadGroup>, UpdateError> {
        match &self.ranks {
            Ranks::Threads(1, _) | Ranks::Process(_) => Ok(Vec::new()),
            Ranks::Threads(world_size, options) => {
                Ok(ThreadGroup::new(*world_size, options.clone())?)
            }
        }
    }

    /// The groups of the ranks of this program.
    fn groups(&self, threads: &[ThreadGroup]) -> Vec<Arc<dyn ProcessGroup>> {
        match &self.ranks {
            Ranks::Threads(1, _) => vec![Arc::new(SingleRank::new())],
            Ranks::Threads(..) => {
                let shared = |group: &ThreadGroup| Arc::new(group.clone()) as _;
                threads.iter().map(shared).collect()
            }
            Ranks::Process(group) => vec![group.clone()],
        }
    }

    /// What is the same on all ranks.
    fn run_of(
        &self,
        components: &TrainingComponents<LC>,
        first: usize,
        resumed_at: Option<Position>,
    ) -> Run<LC> {
        let order = match &self.train_loader {
            Some(loader) => format!(", in the order of {}", loader.description()),
            None => String::new(),
        };
        Run {
            driver: self.driver.clone(),
            interrupter: components.interrupter.clone(),
            store: components.event_store.clone(),
            first,
            last_epoch: components.num_epochs,
            counting: self.counting,
            tail: self.tail,
            seed: self.seed,
            pace: self.pace.clone(),
            order: order.into(),
            begins_at_epoch: self.train_loader.is_some(),
            resumed_at,
            train_metrics: self.train_metrics,
        }
    }

    /// # Errors
    ///
    /// [`UpdateError::Strategy`] where a training that counts in updates is resumed from a record
    /// that does not say where it was in its data: the number of the record is not an epoch's.
    fn check_resumption(
        &self,
        record: Option<usize>,
        resumed_at: Option<Position>,
    ) -> Result<(), UpdateError> {
        let Some(number) = record.filter(|_| resumed_at.is_none()) else {
            return Ok(());
        };
        let Counting { until, interval } = self.counting;
        if until.is_none() && interval.is_none() {
            return Ok(());
        }
        Err(UpdateError::Strategy(format!(
            "record {number} does not say where its training was in the data, so it cannot be resumed by updates: it was made \
             by epochs or by another loop, or its optimizer's driver has no position"
        )))
    }

    /// The device of each rank of this program.
    ///
    /// # Errors
    ///
    /// [`UpdateError::Strategy`] if the user has named another number of them.
    fn devices_of(
        &self,
        learner: &Learner<LC>,
        ranks: usize,
    ) -> Result<Vec<Device<TrainingBackend<LC>>>, UpdateError> {
        let Some(devices) = &self.devices else {
            let device = device_of::<TrainingBackend<LC>, _>(&learner.model());
            return Ok(vec![device; ranks]);
        };
        if devices.len() == ranks {
            return Ok(devices.clone());
        }
        Err(UpdateError::Strategy(format!(
            "there are {} devices for {ranks} ranks: name one for each",
            devices.len()
        )))
    }

    /// The training data of each rank, beginning with this epoch where a loader knows epochs.
    fn training_parts(
        &self,
        train: &TrainLoader<LC>,
        world_size: usize,
        epoch: usize,
    ) -> Vec<TrainLoader<LC>> {
        let Some(loader) = &self.train_loader else {
            return split(train, world_size);
        };
        let of_rank = |rank| {
            loader.of_rank(EpochOfRank {
                epoch,
                rank,
                ranks: world_size,
            })
        };
        (0..world_size).map(of_rank).collect()
    }
}

/// Runs the ranks, rank 0 on this thread, where the user's renderer and handles are. A rank that
/// fails aborts the group.
fn run_threads<LC: LearningComponentsTypes + 'static>(
    ranks: Vec<Box<Rank<LC>>>,
    groups: Vec<ThreadGroup>,
) -> Vec<Result<Trained<LC>, UpdateError>> {
    let run = |group: ThreadGroup, mut rank: Box<Rank<LC>>| {
        // Rank 0 takes its first step after collectives of all ranks, so its Learner does not
        // change during the copy.
        let driver = if rank.rank_0.is_none() {
            let (learner, driver) = copy_for_rank(|| (rank.learner.clone(), rank.driver()));
            rank.learner = learner;
            driver
        } else {
            rank.driver()
        };
        let trained = rank.run(&*driver);
        trained.inspect_err(|error| group.abort(&error.to_string()))
    };
    let results = ThreadGroup::run_with(groups, ranks, run);
    results.into_iter().map(|result| result?).collect()
}

/// The results, or the error of the rank that failed: on the other ranks its failure is a fault of
/// the group.
fn result_of_all<R>(
    results: Vec<Result<R, UpdateError>>,
    group: &ThreadGroup,
) -> Result<Vec<R>, UpdateError> {
    let errors = || results.iter().filter_map(|result| result.as_ref().err());
    if let Some(error) =
        errors().find(|error| !matches!(error, UpdateError::Ranks(RanksError::Group(_))))
    {
        return Err(error.clone());
    }
    if errors().next().is_some() {
        // Fails with the fault of the group.
        group.barrier("end of the training")?;
    }
    results.into_iter().collect()
}
