//! `run EXAMPLE plain|update|all DIRECTORY` trains one of Burn's examples for a little: as it is,
//! with its optimizer in an `Update`, or with all parts of an update on the stack of all decorators.

use burn::backend::Autodiff;
use burn::grad_clipping::GradientClippingConfig;
use burn::nn::attention::SeqLengthOption;
use burn::nn::transformer::TransformerEncoderConfig;
use burn::optim::{AdamConfig, RmsPropConfig};
use burn::tensor::backend::Backend;
use burn::train::ExecutionStrategy;
use burn_amp::{Autocast, F16};
use burn_checkpoint::Remat;
use burn_flex::Flex;
use burn_fused::FusedBackward;
use burn_zero::Sharded;

type Plain = Autodiff<Flex>;
type All = Autocast<Sharded<FusedBackward<Autodiff<Remat<Flex>>>>, F16>;

/// One of the examples, as `$module` has it, on a backend.
macro_rules! train {
    (
        $backend:ty, $example:expr, $directory:expr,
        $guide:ident $mnist:ident $text:ident $custom:ident $lstm:ident $wgan:ident
    ) => {{
        let device = Default::default();
        match $example {
            "guide" => {
                let model = $guide::model::ModelConfig::new(10, 64);
                let config = $guide::training::TrainingConfig::new(model, AdamConfig::new());
                let config = config.with_num_epochs(2).with_learning_rate(1e-3);
                $guide::training::train::<$backend>($directory, config, device);
            }
            "mnist" => $mnist::training::run::<$backend>(device),
            "text-classification" => {
                let transformer = TransformerEncoderConfig::new(32, 64, 4, 2).with_norm_first(true);
                let config = $text::training::ExperimentConfig::new(transformer, AdamConfig::new());
                let config = config
                    .with_num_epochs(2)
                    .with_seq_length(SeqLengthOption::Fixed(16));
                let (train, test) = ($text::AgNewsDataset::train(), $text::AgNewsDataset::test());
                // The example leaves its weights to chance.
                <$backend as Backend>::seed(&device, 42);
                let alone = ExecutionStrategy::<$backend>::SingleDevice(device);
                $text::training::train::<$backend, $text::AgNewsDataset>(
                    alone, train, test, config, $directory,
                );
            }
            "custom-training-loop" => $custom::run::<$backend>(device),
            "modern-lstm" => {
                let model = $lstm::model::LstmNetworkConfig::new();
                let adam =
                    AdamConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)));
                let config = $lstm::training::TrainingConfig::new(model, adam);
                $lstm::training::train::<$backend>($directory, config.with_num_epochs(9), device);
            }
            "wgan" => {
                let model = $wgan::model::ModelConfig::new();
                let config = $wgan::training::TrainingConfig::new(model, RmsPropConfig::new());
                let config = config
                    .with_num_epochs(2)
                    .with_batch_size(64)
                    .with_num_critic(2);
                $wgan::training::train::<$backend>($directory, config, device);
            }
            other => panic!("no example {other}"),
        }
    }};
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let [example, lines, directory] = [(); 3].map(|()| {
        arguments
            .next()
            .expect("EXAMPLE plain|update|all DIRECTORY")
    });
    match &*lines {
        "plain" => {
            train!(Plain, &*example, &directory,
                plain_guide plain_mnist plain_text_classification
                plain_custom_training_loop plain_modern_lstm plain_wgan)
        }
        "update" => {
            train!(Plain, &*example, &directory,
                ours_guide ours_mnist ours_text_classification
                ours_custom_training_loop ours_modern_lstm ours_wgan)
        }
        "all" => {
            train!(All, &*example, &directory,
                ours_guide ours_mnist ours_text_classification
                ours_custom_training_loop ours_modern_lstm ours_wgan)
        }
        other => panic!("no lines {other}"),
    }
}
