//! Burn's Learner on `Meta`, alone and with ranks: a training of the gpt example that runs without
//! data.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::Module;
use burn::optim::AdamWConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};
use burn::train::metric::LossMetric;
use burn::train::{Learner, SupervisedTraining};
use burn_amp::Autocast;
use burn_checkpoint::Remat;
use burn_estimate::{Estimate, Meta, MetaDevice, estimate_run};
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{ReduceOverRanks, Sharded, SilentRenderer, Stage, ZeroSettings};
use examples::gpt::loader::TokenBatch;
use examples::gpt::model::GptConfig;
use examples::training::recompute::Checkpoint;

use super::turn;

type B = Autocast<Sharded<Autodiff<Remat<Meta>>>>;

const CONTEXT: usize = 32;

/// Batches of tokens that are all zero.
struct Zeros;

impl<B: Backend> Batcher<B, u8, TokenBatch<B>> for Zeros {
    fn batch(&self, items: Vec<u8>, device: &B::Device) -> TokenBatch<B> {
        let tokens = Tensor::<B, 2, Int>::zeros([items.len(), CONTEXT], device);
        TokenBatch {
            inputs: tokens.clone(),
            targets: tokens,
        }
    }
}

fn loader<B: Backend>(items: usize) -> Arc<dyn DataLoader<B, TokenBatch<B>>> {
    let items = InMemDataset::new(vec![0; items]);
    DataLoaderBuilder::new(Zeros).batch_size(4).build(items)
}

/// An epoch of 3 steps a rank: what it takes on the first rank's device, the bytes of its
/// parameters, and the losses that the Learner logs.
fn train(ranks: usize, stage: Stage) -> (Estimate, u64, Vec<String>) {
    let device = MetaDevice::new(1);
    let name = format!("burn-estimate-learner-{}", std::process::id());
    let directory = std::env::temp_dir().join(name);
    let config = GptConfig::new(CONTEXT, 2, 2, 256).with_checkpoint(Checkpoint::Block);
    let (estimate, bytes) = estimate_run(device, || {
        let model = config.init::<B>(&device);
        let bytes = 4 * model.num_params() as u64;
        let update = Update::new(AdamWConfig::new().init());
        let update = update.reduce_in_learner(ZeroSettings::stage(stage));
        let update = update.expect("one reduction");
        let devices = (1..=ranks as u16).map(MetaDevice::new);
        let strategy = update.strategy().threads(ranks);
        let strategy = strategy.with_devices(devices.collect());
        SupervisedTraining::new(&directory, loader(12 * ranks), loader(4))
            .metric_train_numeric(LossMetric::<Flex>::new())
            .with_application_logger(None)
            .renderer(SilentRenderer)
            .num_epochs(1)
            .with_training_strategy(strategy.into())
            .launch(Learner::new(model, update, ConstantLr::new(1e-3)));
        bytes
    });
    let log = std::fs::read_to_string(directory.join("train/epoch-1/Loss.log"));
    let losses = log.expect("a log").lines().map(str::to_owned).collect();
    std::fs::remove_dir_all(directory).expect("cleaned up");
    (estimate, bytes, losses)
}

/// The Learner keeps the old parameters during a step: with the new ones, gradients and AdamW's two
/// moments five times their bytes.
#[test]
fn a_training_takes_what_its_optimizer_takes() {
    let _turn = turn();
    let (estimate, parameters, losses) = train(1, Stage::DataParallel);
    let ratio = estimate.peak_bytes as f64 / parameters as f64;
    println!("{ratio:.2} of the parameters\n{estimate}");
    assert_eq!(losses.len(), 3);
    assert!((4.9..5.6).contains(&ratio), "{ratio}\n{estimate}");
    assert!(estimate.replayed_operations > 0);
}

#[test]
fn ranks_that_are_threads_train_on_a_device_each() {
    let _turn = turn();
    let peaks = Stage::WITH_WHOLE_PARAMETERS.map(|stage| {
        let (estimate, _, losses) = train(4, stage);
        // Rank 0 logs the items of all.
        assert_eq!(losses.len(), 3 * 4);
        estimate.peak_bytes
    });
    assert!(peaks.is_sorted_by(|more, less| more > less), "{peaks:?}");
}
