//! Whoever reads gradients of ranks outside of the update is told once.

use std::sync::{Arc, Mutex};

use burn::backend::Autodiff;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{ElementConversion, Tensor};
use burn_accum::{AccumConfig, ClipByNorm};
use burn_amp::{Autocast, F16, GradScalerConfig};
use burn_checkpoint::Remat;
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{
    GroupOptions, Memory, ProcessGroup, RankReduction, ReduceOverRanks, Sharded, Stage,
    ThreadGroup, WithHost, ZeroSettings,
};
use log::{LevelFilter, Log, Metadata, Record};

type B = Sharded<Autodiff<Remat<Flex>>>;
type Inner = WithHost<Remat<Flex>>;

/// What was said about gradients that are read.
static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Listener;

impl Log for Listener {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let text = record.args().to_string();
        if text.contains("outside of the update") {
            SAID.lock().unwrap().push(text);
        }
    }

    fn flush(&self) {}
}

fn said() -> Vec<String> {
    std::mem::take(&mut *SAID.lock().unwrap())
}

const STAGES: [Stage; 4] = [
    Stage::DataParallel,
    Stage::OptimizerState,
    Stage::Gradients,
    Stage::Parameters,
];

fn model<B: AutodiffBackend>() -> Linear<B> {
    LinearConfig::new(6, 5).init(&Default::default())
}

fn gradients<B: AutodiffBackend>(model: &Linear<B>, rank: usize) -> GradientsParams {
    let x = Tensor::<B, 2>::full([2, 6], 1.0 + rank as f32, &Default::default());
    GradientsParams::from_grads(model.forward(x).square().mean().backward(), model)
}

/// An update's parts, Burn's accumulation, and the norm over all ranks: all of it belongs to an
/// update.
fn update_as_intended<B: AutodiffBackend>(group: ThreadGroup, settings: ZeroSettings) {
    let rank = group.rank();
    let reduction = RankReduction::new(settings, Arc::new(group)).unwrap();
    let update = Update::new(AdamWConfig::new().init()).clip_norm(1.0);
    let mut update = update.unwrap().reduce_by(&reduction).unwrap();
    let mut model = update.prepare(model::<B>()).unwrap();
    for _ in 0..2 {
        let mut accumulator = GradientsAccumulator::new();
        for _ in 0..2 {
            accumulator.accumulate(&model, gradients(&model, rank));
        }
        let sums = accumulator.grads();
        reduction.global_norm::<B, _>(&model, &sums).unwrap();
        model = update.step(0.01, model, sums).unwrap();
    }
    let windows = update.accumulate(AccumConfig::mean(2)).unwrap();
    let mut update = windows.scale(GradScalerConfig::default()).unwrap();
    for _ in 0..4 {
        let gradients = gradients(&model, rank);
        model = update.step(0.01, model, gradients).unwrap();
    }
    update.record();
}

fn over_ranks(settings: ZeroSettings, group: ThreadGroup) -> Update<Linear<B>, B> {
    let update = Update::new(AdamWConfig::new().init());
    update.reduce(settings, Arc::new(group)).unwrap()
}

fn sum_of_squares(model: &Linear<B>, gradients: &GradientsParams) -> f32 {
    let gradient = gradients.get::<Inner, 2>(model.weight.id).unwrap();
    gradient.powf_scalar(2.0).sum().into_scalar().elem()
}

#[test]
fn a_loop_that_reads_gradients_of_ranks_is_told_once_what_to_do() {
    log::set_logger(&Listener).unwrap();
    log::set_max_level(LevelFilter::Warn);

    for stage in STAGES {
        for gradients in [Memory::Device, Memory::Host] {
            let settings = ZeroSettings {
                gradients,
                ..ZeroSettings::stage(stage)
            };
            ThreadGroup::spawn(2, GroupOptions::default(), |group| {
                update_as_intended::<B>(group, settings.clone());
            })
            .unwrap();
            ThreadGroup::spawn(2, GroupOptions::default(), |group| {
                update_as_intended::<Autocast<B, F16>>(group, settings.clone());
            })
            .unwrap();
            assert_eq!(said(), [""; 0], "{stage}");
        }
    }
    // One rank has all of its gradients.
    ThreadGroup::spawn(1, GroupOptions::default(), |group| {
        let zero = ZeroSettings::stage(Stage::Gradients);
        let mut update = over_ranks(zero, group);
        let model = update.prepare(model()).unwrap();
        sum_of_squares(&model, &gradients(&model, 0));
    })
    .unwrap();
    assert_eq!(said(), [""; 0]);

    for stage in STAGES.into_iter().rev() {
        ThreadGroup::spawn(2, GroupOptions::default(), |group| {
            let rank = group.rank();
            let zero = ZeroSettings::stage(stage);
            let mut update = over_ranks(zero, group);
            let mut model = update.prepare(model()).unwrap();
            for _ in 0..2 {
                let gradients = gradients(&model, rank);
                sum_of_squares(&model, &gradients);
                model = update.step(0.01, model, gradients).unwrap();
            }
        })
        .unwrap();
    }
    let said = said();
    let [line] = said.as_slice() else {
        panic!("one warning, not {said:?}");
    };
    assert!(
        line.contains("RankReduction::global_norm(&model, &gradients)"),
        "{line}"
    );
    assert!(
        line.contains("this rank's shard")
            && line.contains(".clip_norm(1.0)?.reduce(settings, group)?"),
        "{line}"
    );
}
