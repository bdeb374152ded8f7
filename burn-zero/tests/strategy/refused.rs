//! What cannot be trained is said before the first step, and what ends one rank ends all.

use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use burn::lr_scheduler::{LrScheduler, constant::ConstantLr};
use burn::optim::{AdamWConfig, GradientsParams, MuonConfig, Optimizer};
use burn::tensor::backend::Backend;
use burn::train::Learner;
use burn_accum::AccumConfig;
use burn_update::{EpochTail, Update, UpdateStrategy};
use burn_zero::{
    DeepSpeedConfig, FromDeepSpeed, GroupOptions, ParameterShards, ProcessGroup, ReduceOverRanks,
    Stage, ThreadGroup, ZeroSettings,
};

use crate::Z;
use crate::child::{ended, is_child};
use crate::learner::{Components, Setup, train_shown};
use crate::model::{Model, rows};
use crate::watch::Watch;

type Strategy<S> = UpdateStrategy<Components<Z, Update<Model<Z>, Z>, S>>;

/// The message, and what was shown.
fn refused<S: LrScheduler + 'static>(
    update: Update<Model<Z>, Z>,
    scheduler: S,
    setup: Setup,
    ranks: impl FnOnce(Strategy<S>) -> Strategy<S>,
) -> (String, usize) {
    let watch = Watch::default();
    let strategy = Some(ranks(update.strategy()).into());
    let learner = Learner::new(Model::new(), update, scheduler);
    let trained = catch_unwind(AssertUnwindSafe(|| {
        train_shown(learner, setup, strategy, watch.clone(), watch.renderer());
    }));
    let panic = trained.expect_err("it is refused");
    let message = *panic.downcast::<String>().expect("a message");
    (message, watch.shown("train: ").len())
}

fn two<S: LrScheduler + 'static>(strategy: Strategy<S>) -> Strategy<S> {
    strategy.threads(2)
}

/// An update over ranks.
fn reduced(optimizer: impl Optimizer<ParameterShards<Z>, Z> + 'static) -> Update<Model<Z>, Z> {
    let update = Update::new(optimizer);
    let settings = ZeroSettings::stage(Stage::Gradients);
    update.reduce_in_learner(settings).expect("one reduction")
}

fn adam() -> Update<Model<Z>, Z> {
    reduced(AdamWConfig::new().init())
}

fn setup() -> Setup {
    Setup::new(rows(0, 17), 1)
}

#[test]
fn an_update_without_ranks() {
    let _turn = crate::turn();
    let update = Update::new(AdamWConfig::new().init());
    let (message, steps) = refused(update, ConstantLr::new(0.1), setup(), two);
    let text = "this update reduces no gradients over ranks";
    assert!(message.contains(text), "{message}");
    assert_eq!(steps, 0);
}

/// The windows of a file's update are those of so many ranks.
#[test]
fn another_number_of_ranks_than_that_of_a_files_update() {
    let _turn = crate::turn();
    let file = r#"{"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW"}}"#;
    let config = DeepSpeedConfig::from_json(file).expect("a file");
    let update = Update::from_deepspeed_in_learner(&config, 3).expect("an update");
    let (message, steps) = refused(update, ConstantLr::new(0.1), setup(), two);
    let text = "batch sizes over 3 ranks, but the strategy has 2";
    assert!(message.contains(text), "{message}");
    assert_eq!(steps, 0);
}

/// The record of rank 0 has its own window only.
#[test]
fn open_windows_in_records_over_ranks() {
    let _turn = crate::turn();
    let windows = AccumConfig::mean(2);
    let update = adam().accumulate(windows).expect("a window");
    let carry = |strategy: Strategy<_>| strategy.threads(2).with_tail(EpochTail::Carry);
    let (message, steps) = refused(update, ConstantLr::new(0.1), setup(), carry);
    assert!(
        message.contains("`EpochTail::Carry` with records"),
        "{message}"
    );
    assert_eq!(steps, 0);
}

#[test]
fn an_update_over_ranks_without_its_strategy() {
    let _turn = crate::turn();
    let learner = Learner::new(Model::<Z>::new(), adam(), ConstantLr::new(0.1));
    let watch = Watch::default();
    let trained = catch_unwind(AssertUnwindSafe(|| {
        train_shown(learner, setup(), None, watch.clone(), watch.renderer());
    }));
    let panic = trained.expect_err("it is refused");
    let message = panic.downcast::<String>().expect("a message");
    assert!(message.contains("update.strategy()"), "{message}");
}

#[test]
fn an_optimizer_that_cannot_be_cut() {
    let _turn = crate::turn();
    let update = reduced(MuonConfig::new().init());
    let (message, steps) = refused(update, ConstantLr::new(0.1), setup(), two);
    assert!(message.contains("Partition::Whole"), "{message}");
    assert_eq!(steps, 0);
}

#[test]
fn burns_own_accumulation() {
    let _turn = crate::turn();
    let mut setup = setup();
    setup.burns_accumulation = Some(2);
    let (message, _) = refused(adam(), ConstantLr::new(0.1), setup, two);
    let text = ".accumulate(AccumConfig::mean(2))";
    assert!(message.contains(text), "{message}");
}

#[test]
fn a_device_for_each_rank() {
    let _turn = crate::turn();
    let one = |strategy: Strategy<_>| two(strategy).with_devices(vec![Default::default()]);
    let (message, steps) = refused(adam(), ConstantLr::new(0.1), setup(), one);
    assert!(message.contains("1 devices for 2 ranks"), "{message}");
    assert_eq!(steps, 0);
}

/// Rank 1 goes on from a record of one step more: the record of all would have two counts.
#[test]
fn states_of_different_steps() {
    let _turn = crate::turn();
    let start = Model::<Z>::new();
    let trained = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let mut before = AdamWConfig::new().init::<Z, Model<Z>>();
        for _ in 0..11 + ProcessGroup::rank(&group) {
            let loss = start.loss_sum(&rows(0, 4));
            let gradients = GradientsParams::from_grads(loss.backward(), &start);
            let _ = before.step(0.1, start.clone(), gradients);
        }
        let adam = AdamWConfig::new().init::<Z, ParameterShards<Z>>();
        let update = reduced(adam.load_record(before.to_record()));
        let strategy = Some(update.strategy().process(Arc::new(group)).into());
        let learner = Learner::new(start.clone(), update, ConstantLr::new(0.1));
        let watch = Watch::default();
        train_shown(learner, setup(), strategy, watch.clone(), watch.renderer());
    });
    let message = trained.unwrap_err().to_string();
    // 17 rows are 3 steps of a rank.
    let told = "state of the optimizer: rank";
    assert!(message.contains(told), "{message}");
    let sides = ["`14`", "`15`"];
    assert!(sides.iter().all(|side| message.contains(side)), "{message}");
}

/// What a rank's schedule does.
#[derive(Clone, Copy)]
enum Schedule {
    Constant,
    Other,
    /// Other in the first step only.
    OtherAtFirst,
    Panic,
    Hang,
}

/// On the threads of ranks other than rank 0; constant there.
#[derive(Clone, Copy)]
struct OfOthers(Schedule);

impl LrScheduler for OfOthers {
    type Record<B: Backend> = ();

    fn step(&mut self) -> f64 {
        let rank = thread::current();
        if !rank.name().is_some_and(|name| name.starts_with("rank ")) {
            return 0.1;
        }
        match self.0 {
            Schedule::Constant => 0.1,
            Schedule::Other => 0.2,
            Schedule::OtherAtFirst => {
                self.0 = Schedule::Constant;
                0.2
            }
            Schedule::Panic => panic!("the schedule is over"),
            Schedule::Hang => loop {
                spin_loop();
            },
        }
    }

    fn to_record<B: Backend>(&self) {}

    fn load_record<B: Backend>(self, (): ()) -> Self {
        self
    }
}

/// The others have `schedule`, rank 0 a constant one.
fn others(schedule: Schedule) -> String {
    others_in(schedule, GroupOptions::default())
}

fn others_in(schedule: Schedule, options: GroupOptions) -> String {
    let three = |strategy: Strategy<_>| strategy.threads(3).with_options(options);
    let started = Instant::now();
    let (message, _) = refused(adam(), OfOthers(schedule), setup(), three);
    assert!(started.elapsed() < Duration::from_secs(30));
    message
}

#[test]
fn a_rank_that_panics_ends_all_with_its_message() {
    let _turn = crate::turn();
    let message = others(Schedule::Panic);
    let ended = ["rank 1 panicked", "rank 2 panicked"];
    assert!(ended.iter().any(|by| message.starts_with(by)), "{message}");
    assert!(message.ends_with("the schedule is over"), "{message}");
}

#[test]
fn schedules_that_differ_are_found_in_the_first_step() {
    let _turn = crate::turn();
    let message = others(Schedule::Other);
    let sides = ["step 1, lr 0.1 (", "step 1, lr 0.2 ("];
    assert!(sides.iter().all(|side| message.contains(side)), "{message}");
}

/// The optimizer does not see the rate of a step that it only adds up.
#[test]
fn schedules_that_differ_within_a_window_are_found_too() {
    let _turn = crate::turn();
    let update = adam().accumulate(AccumConfig::mean(2)).expect("a window");
    let schedule = OfOthers(Schedule::OtherAtFirst);
    let (message, _) = refused(update, schedule, setup(), two);
    let sides = ["epoch 1, step 1, lr 0.1`", "epoch 1, step 1, lr 0.2`"];
    assert!(sides.iter().all(|side| message.contains(side)), "{message}");
}

#[test]
#[ignore = "a child of the next test"]
fn others_hang() {
    if is_child() {
        let options = GroupOptions::with_deadline(Duration::from_secs(2));
        others_in(Schedule::Hang, options);
    }
}

/// Threads cannot be ended from outside.
#[test]
fn ranks_that_hang_end_the_process_with_the_fault() {
    let _turn = crate::turn();
    let (status, text) = ended("refused::others_hang", Duration::from_secs(60));
    assert_eq!(status, Some(1), "{text}");
    let last = text.lines().last().unwrap_or_default();
    assert!(last.contains("rank 0 waited 2s in "), "{text}");
    let end = "; the process ends, and with it rank 1 and rank 2";
    assert!(last.ends_with(end), "{text}");
}
