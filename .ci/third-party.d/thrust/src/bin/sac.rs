//! thrust-rl's SAC trainer, whose optimizers are a concrete type: `OptimizerAdaptor<Adam, M, B>`.
//! What goes around or in place of an optimizer cannot get in.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{F32, GradScaler, autocast};
use burn_zero::{ProcessGroup, ZeroSettings};
use frame::{Dropout, Ended, NotTrained, Part, Project, STEPS, Steps, Training, checksum};
use thrust_rl::train::{SacConfig, SacTrainer};

struct Sac;

const OBSERVATIONS: usize = 3;
const ACTIONS: usize = 1;
const REFUSAL: &str = "`SacTrainer` makes its own `OptimizerAdaptor<Adam, M, B>`: no other optimizer can be given to it";

struct Own<B: AutodiffBackend>(SacTrainer<B>);

impl<B: AutodiffBackend> Training<B> for Own<B> {
    fn parameters(&self) -> usize {
        let critics = [self.0.q1(), self.0.q2()].map(Module::num_params);
        self.0.actor().num_params() + critics.into_iter().sum::<usize>() + 1
    }

    fn with_adamw(self, steps: &mut Steps) -> Ended {
        let Self(mut trainer) = self;
        for row in steps.rows.clone() {
            let [here, next] = [0, 1].map(|step| frame::row(step, row, OBSERVATIONS));
            let action = frame::row(2, row, ACTIONS);
            let reward = frame::row(3, row, 1)[0];
            trainer
                .buffer_mut()
                .push(&here, &action, reward, &next, false);
        }
        steps.start();
        for step in 0..STEPS {
            let stats = trainer.train_step().expect("finite losses");
            // It reads with `to_vec::<f32>()`, which panics on what autocast has lowered.
            let observation = frame::row(4, step, OBSERVATIONS);
            let action = autocast::<F32, _>(|| trainer.select_action(&observation));
            assert!(action[0].is_finite());
            steps.end(stats.critic_loss as f32);
        }
        let critics =
            [trainer.q1(), trainer.q2()].map(|critic| checksum::<B, _>(critic, Part::Whole));
        Ok(checksum::<B, _>(trainer.actor(), Part::Whole)
            ^ critics[0].rotate_left(1)
            ^ critics[1].rotate_left(2))
    }

    fn with_units(self, _: &mut Steps) -> Ended {
        Err(NotTrained::ByProject(REFUSAL.to_owned()))
    }

    fn with_scaler(self, _: &GradScaler, _: &mut Steps) -> Ended {
        Err(NotTrained::ByProject(REFUSAL.to_owned()))
    }

    fn as_rank(self, _: Arc<dyn ProcessGroup>, _: ZeroSettings, _: &mut Steps) -> Ended {
        Err(NotTrained::ByProject(REFUSAL.to_owned()))
    }
}

impl Project for Sac {
    const NAME: &'static str = "thrust-rl 0.4.0, SAC";
    const ROWS: usize = 64;

    fn training<B: AutodiffBackend>(device: B::Device, _: Dropout) -> impl Training<B> {
        let config = SacConfig {
            batch_size: Self::ROWS,
            learning_starts: 0,
            min_buffer_size: Self::ROWS,
            buffer_capacity: 2 * Self::ROWS,
            ..SacConfig::default()
        };
        Own(SacTrainer::new(config, OBSERVATIONS, ACTIONS, device).expect("a valid configuration"))
    }
}

fn main() {
    frame::main::<Sac>();
}
