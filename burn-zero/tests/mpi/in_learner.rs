//! A Learner, on processes and on threads, bare and with each of the layers around its optimizer.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::lr_scheduler::{
    LrScheduler, constant::ConstantLr, linear::LinearLrScheduler, linear::LinearLrSchedulerConfig,
};
use burn::optim::AdamWConfig;
use burn::tensor::backend::AutodiffBackend;
use burn::train::Learner;
use burn_accum::AccumConfig;
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_checkpoint::Remat;
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{
    MpiGroup, ProcessGroup, RankReduction, ReduceOverRanks, Sharded, Stage, ZeroSettings,
};

use crate::learner::{MICRO_BATCH, Outcome, Setup, train_shown};
use crate::model::{Model, Row, bits, rows};
use crate::watch::Watch;

type B = Sharded<Autodiff<Remat<Flex>>>;
type Half = Autocast<B, F16>;

/// What is in the update beside a reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layers {
    Bare,
    /// Nothing, and parameters are sharded.
    Parameters,
    /// Of which one rank overflows.
    Scaler,
    /// Windows of micro-batches, the epoch's last one open.
    Accumulation,
    /// In the model: masks are drawn.
    Dropout,
    /// Windows weighted by the rows that count, of which no two ranks have as many.
    Tokens,
}

/// What a training came to on each rank, and what it showed, logged and wrote on rank 0.
pub struct Trained {
    pub trained: String,
    pub saw: String,
}

/// The group of this process, or the number of threads.
type Ranks = Result<MpiGroup, usize>;

impl Layers {
    pub const ALL: [Self; 6] = [
        Self::Bare,
        Self::Parameters,
        Self::Dropout,
        Self::Scaler,
        Self::Accumulation,
        Self::Tokens,
    ];

    /// The name of the program of each process.
    pub fn program(self) -> String {
        format!("learner {self:?}")
    }

    pub fn of(program: &str) -> Option<Self> {
        let mut all = Self::ALL.into_iter();
        all.find(|layers| layers.program() == program)
    }

    pub fn on_threads(self, ranks: usize) -> Trained {
        self.run(Err(ranks)).0
    }

    pub fn on_processes(self, group: MpiGroup) {
        let rank = group.rank();
        let (trained, is_seen) = self.run(Ok(group));
        println!("trained {}", trained.trained);
        if rank == 0 || is_seen {
            println!("saw {}", trained.saw);
        }
    }

    /// Also whether anything was shown, logged or written.
    fn run(self, ranks: Ranks) -> (Trained, bool) {
        let world_size = match &ranks {
            Ok(group) => group.world_size(),
            Err(ranks) => *ranks,
        };
        match self {
            Self::Bare => {
                let model = Model::<B>::new();
                let schedule = ConstantLr::new(0.1);
                train(ranks, model, reduced(), schedule, rows(0, 21), String::new)
            }
            Self::Parameters => {
                // Only rank 0 has the model that the training returns.
                let has_model = ranks.as_ref().map_or(true, |group| group.rank() == 0);
                let update = reduced_by(&reduction(Stage::Parameters));
                let schedule = ConstantLr::new(0.1);
                let outcome = outcome(ranks, Model::<B>::new(), update, schedule, rows(0, 21));
                let model = has_model.then_some(&outcome.model);
                Trained::of(&outcome, model, "")
            }
            Self::Dropout => {
                let model = Model::<B>::new().dropping(0.3);
                let update = reduced_by(&reduction(Stage::Gradients).with_seed(7));
                let schedule = ConstantLr::new(0.1);
                train(ranks, model, update, schedule, rows(0, 21), String::new)
            }
            Self::Scaler => scaled(ranks, world_size),
            Self::Accumulation => {
                let model = Model::<B>::new();
                let update = reduced().accumulate(AccumConfig::mean(4)).unwrap();
                let schedule = update.per_update(falling());
                let data = rows(0, 6 * MICRO_BATCH * world_size - 3);
                train(ranks, model, update, schedule, data, String::new)
            }
            Self::Tokens => {
                let model = Model::<B>::new().counting();
                let update = reduced().accumulate(AccumConfig::tokens(2)).unwrap();
                let schedule = ConstantLr::new(0.05);
                let mut data = rows(0, 5 * MICRO_BATCH * world_size);
                for (micro_batch, rows) in data.chunks_mut(MICRO_BATCH).enumerate() {
                    let padding = (micro_batch / 3 + micro_batch % 2) % MICRO_BATCH;
                    rows[..padding].iter_mut().for_each(|row| row.weight = 0.0);
                }
                train(ranks, model, update, schedule, data, String::new)
            }
        }
    }
}

/// The last rank's second step leaves f16.
fn scaled(ranks: Ranks, world_size: usize) -> (Trained, bool) {
    let config = GradScalerConfig {
        init_scale: 1024.0,
        ..GradScalerConfig::default()
    };
    let scaler = GradScaler::new(config).unwrap();
    let update = reduced().scale(scaler.clone()).unwrap();
    let mut data = rows(0, 4 * MICRO_BATCH * world_size);
    let of_last = 4 * MICRO_BATCH * (world_size - 1);
    data[of_last + MICRO_BATCH + 1].weight = 3e6;
    let told = move || {
        let counts = (scaler.skipped_steps(), scaler.steps(), scaler.scale());
        format!(" scaler {counts:?}")
    };
    let (trained, is_seen) = train(ranks, Model::<Half>::new(), update, falling(), data, told);
    let skipped = "(2, 8, 256.0)"; // once an epoch
    assert!(trained.trained.ends_with(skipped), "{}", trained.trained);
    (trained, is_seen)
}

fn reduction(stage: Stage) -> RankReduction {
    RankReduction::in_learner(ZeroSettings {
        bucket_elements: 20,
        ..ZeroSettings::stage(stage)
    })
}

fn reduced_by<A: AutodiffBackend>(reduction: &RankReduction) -> Update<Model<A>, A> {
    let update = Update::new(AdamWConfig::new().init());
    update.reduce_by(reduction).unwrap()
}

fn reduced<A: AutodiffBackend>() -> Update<Model<A>, A> {
    reduced_by(&reduction(Stage::Gradients))
}

fn falling() -> LinearLrScheduler {
    LinearLrSchedulerConfig::new(0.1, 0.01, 40).init().unwrap()
}

/// Trains; `told` is added to what that came to.
fn train<B, S>(
    ranks: Ranks,
    model: Model<B>,
    update: Update<Model<B>, B>,
    schedule: S,
    data: Vec<Row>,
    told: impl FnOnce() -> String,
) -> (Trained, bool)
where
    B: AutodiffBackend,
    S: LrScheduler + 'static,
{
    let outcome = outcome(ranks, model, update, schedule, data);
    Trained::of(&outcome, Some(&outcome.model), &told())
}

/// Two epochs.
fn outcome<B, S>(
    ranks: Ranks,
    model: Model<B>,
    update: Update<Model<B>, B>,
    schedule: S,
    data: Vec<Row>,
) -> Outcome<B>
where
    B: AutodiffBackend,
    S: LrScheduler + 'static,
{
    let strategy = update.strategy();
    let strategy = match ranks {
        Ok(group) => strategy.process(Arc::new(group)),
        Err(ranks) => strategy.threads(ranks),
    };
    let learner = Learner::new(model, update, schedule);
    let mut setup = Setup::new(data, 2);
    setup.valid = rows(1000, 1017);
    let (watch, strategy) = (Watch::default(), Some(strategy.into()));
    train_shown(learner, setup, strategy, watch.clone(), watch.renderer())
}

impl Trained {
    fn of<B: AutodiffBackend>(
        outcome: &Outcome<B>,
        model: Option<&Model<B::InnerBackend>>,
        told: &str,
    ) -> (Self, bool) {
        let [shown, logged] = outcome.watch.lines();
        let recorded = [1, 2].map(|epoch| outcome.directory.is_recorded(epoch));
        let is_seen = !shown.is_empty() || !logged.is_empty() || recorded.contains(&true);
        let trained = Self {
            trained: format!(
                "{}{told}",
                model.map_or(String::new(), |model| digest(bits(model)))
            ),
            saw: format!("{} recorded {recorded:?}", digest([shown, logged])),
        };
        (trained, is_seen)
    }
}

fn digest(value: impl Hash) -> String {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    format!("{:x}", hasher.finish())
}
