//! thrust-rl's PPO trainer, which owns the policy, clips gradients by hand and takes any optimizer.

use burn::optim::Optimizer;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_amp::{F32, autocast};
use frame::{Dropout, LEARNING_RATE, Project, STEPS, Steps, Training, TrainingLoop, numbers};
use rand::SeedableRng;
use rand::rngs::StdRng;
use thrust_rl::policy::mlp::{MlpBurnConfig, MlpBurnPolicy};
use thrust_rl::train::{BurnOptimizer, PPOConfig, PPOTrainerBurn};

struct Ppo;

const OBSERVATIONS: usize = 4;
const ACTIONS: usize = 2;

struct Rollouts<B: AutodiffBackend>(B::Device);

impl<B: AutodiffBackend> TrainingLoop<B, MlpBurnPolicy<B>> for Rollouts<B> {
    fn run<O: Optimizer<MlpBurnPolicy<B>, B>>(
        self,
        policy: MlpBurnPolicy<B>,
        optimizer: O,
        steps: &mut Steps,
    ) -> MlpBurnPolicy<B> {
        let Self(device) = self;
        let rows = steps.rows.clone();
        // Its clipping by hand sees the gradients that this rank has, so at stages 2 and 3 it must
        // not clip.
        let config = PPOConfig::default()
            .batch_size(rows.len())
            .n_epochs(1)
            .max_grad_norm(1e9)
            .target_kl(1e9);
        let optimizer = BurnOptimizer::new(optimizer, LEARNING_RATE);
        let mut trainer =
            PPOTrainerBurn::new(config, policy, optimizer).expect("a valid configuration");
        let mut rng = StdRng::seed_from_u64(3);
        steps.start();
        for step in 0..STEPS {
            let observations = numbers::<B, 2>(&device, step, rows.clone(), [0, OBSERVATIONS]);
            // It reads with `to_vec::<f32>()`, which panics on what autocast has lowered.
            let (actions, log_probs, values) = autocast::<F32, _>(|| {
                trainer
                    .policy()
                    .get_action_host_seeded(observations.clone(), &mut rng)
            });
            let actions = TensorData::new(actions, [rows.len()]);
            let floats = |values: Vec<f32>| {
                Tensor::<B, 1>::from_data(TensorData::new(values, [rows.len()]), &device)
            };
            let returns = numbers::<B, 2>(&device, 100 + step, rows.clone(), [0, 1]).squeeze_dim(1);
            let advantages =
                numbers::<B, 2>(&device, 200 + step, rows.clone(), [0, 1]).squeeze_dim(1);
            let trained = trainer.train_step(
                observations,
                Tensor::<B, 1, Int>::from_data(actions, &device),
                floats(log_probs),
                floats(values),
                advantages,
                returns,
                |policy, observations, actions| policy.evaluate_actions(observations, actions),
            );
            let stats = match trained {
                Ok(stats) => stats,
                // A backend without data reads an entropy of 0, at which the trainer stops after
                // three updates.
                Err(_) if step == 2 && steps.losses.iter().all(|&loss| loss == 0.0) => break,
                Err(error) => panic!("{error}"),
            };
            steps.end(stats.total_loss as f32);
        }
        trainer.policy().clone()
    }
}

impl Project for Ppo {
    const NAME: &'static str = "thrust-rl 0.4.0, PPO";
    const ROWS: usize = 64;
    const NOT_ADDITIVE: Option<&'static str> =
        Some("each rank draws its actions and normalizes its advantages");

    fn training<B: AutodiffBackend>(device: B::Device, _: Dropout) -> impl Training<B> {
        let config = MlpBurnConfig {
            seed: Some(5),
            ..Default::default()
        };
        let policy = MlpBurnPolicy::<B>::with_config(OBSERVATIONS, ACTIONS, config, &device);
        frame::training(policy, Rollouts(device))
    }
}

fn main() {
    frame::main::<Ppo>();
}
