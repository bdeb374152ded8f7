//! Which backward passes a live scaler touches: those of its own model, and no other's.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{AmpError, Autocast, F16, GradScaler, GradScalerConfig};
use burn_flex::Flex;
use burn_update::Update;
use log::{LevelFilter, Log, Metadata, Record};

type B = Autocast<Autodiff<Flex>, F16>;
type Gradients = <B as AutodiffBackend>::Gradients;

fn linear(value: f32) -> Linear<B> {
    let device = Default::default();
    let mut layer = LinearConfig::new(1, 1).with_bias(false).init(&device);
    layer.weight = Param::from_data([[value]], &device);
    layer
}

fn weight(model: &Linear<B>) -> f32 {
    model.weight.val().into_data().iter::<f32>().next().unwrap()
}

/// A scaler that has not stepped takes losses on any thread without a scaler, so tests run one at a
/// time.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A network with a scaler of its own.
struct Network {
    scaler: GradScaler,
    update: Update<Linear<B>, B>,
    model: Linear<B>,
    /// Its loss is the output times this.
    factor: f64,
    taken: usize,
}

impl Network {
    fn new(factor: f64) -> Self {
        let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
        let update = Update::new(SgdConfig::new().init());
        let model = linear(0.5);
        Self {
            update: update.scale(scaler.clone()).unwrap(),
            scaler,
            model,
            factor,
            taken: 0,
        }
    }

    fn loss(&self) -> Tensor<B, 1> {
        let x = Tensor::<B, 2>::ones([1, 1], &Default::default());
        self.model.forward(x).mean() * self.factor
    }

    fn step(&mut self, backward: impl FnOnce(&GradScaler, Tensor<B, 1>) -> Gradients) {
        let before = weight(&self.model);
        let gradients = backward(&self.scaler, self.loss());
        let gradients = GradientsParams::from_grads(gradients, &self.model);
        let model = self.model.clone();
        self.model = self.update.step(1e-3, model, gradients).unwrap();
        self.taken += usize::from(weight(&self.model) != before);
    }
}

/// PyTorch's numbers of forty iterations: the discriminator's loss overflows above a scale of 1024.
fn assert_as_pytorch(way: &str, backward: impl Fn(&GradScaler, Tensor<B, 1>) -> Gradients) {
    let [mut generator, mut discriminator] = [0.5, 60.0].map(Network::new);
    for _ in 0..40 {
        discriminator.step(&backward);
        generator.step(&backward);
    }
    let scales = [&discriminator, &generator].map(|network| network.scaler.scale());
    assert_eq!(scales, [1024.0, 65_536.0], "{way}");
    assert_eq!([discriminator.taken, generator.taken], [34, 40], "{way}");
}

#[test]
fn two_scalers_on_one_thread_follow_pytorchs_trace() {
    let _turn = turn();
    assert_as_pytorch("a loss says whose it is", |scaler, loss| {
        scaler.backward(loss)
    });
    assert_as_pytorch("by the parameters of the loss", |_, loss| loss.backward());
}

/// Ten steps of a training that scales f16 losses by hand: each moves the weight by 1e-3.
fn train_by_hand(between: &mut dyn FnMut()) {
    let mut model = linear(0.5);
    let mut optimizer = SgdConfig::new().init::<B, Linear<B>>();
    for step in 1..=10 {
        between();
        let x = Tensor::<B, 2>::ones([1, 1], &Default::default());
        // 0.5 * 65504 is near the largest f16.
        let loss = model.forward(x).mean() * 32_768.0;
        let gradient = model.weight.grad(&loss.backward()).unwrap() / 32_768.0;
        let mut gradients = GradientsParams::new();
        gradients.register(model.weight.id, gradient);
        model = optimizer.step(1e-3, model, gradients);
        let expected = 0.5 - 1e-3 * step as f32;
        assert!(
            (weight(&model) - expected).abs() < 1e-5,
            "step {step}: {}",
            weight(&model)
        );
    }
}

#[test]
fn a_training_that_scales_by_hand_is_left_alone_beside_a_live_scaler() {
    let _turn = turn();
    let mut network = Network::new(0.5);
    // In turn on one thread.
    network.step(|_, loss| loss.backward());
    train_by_hand(&mut || network.step(|_, loss| loss.backward()));
    assert_eq!((network.taken, network.scaler.scale()), (11, 65_536.0));
    // On another thread, one after the other and in turn.
    thread::scope(|scope| scope.spawn(|| train_by_hand(&mut || ())).join().unwrap());
    // A scaler that no update has scales nothing: no step would be skipped for it.
    let _scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
    train_by_hand(&mut || ());
    drop(network);
    train_by_hand(&mut || ());
}

/// As Burn's Learner with several devices: a thread for each computes the gradients of a fork, and
/// the main one takes the step.
#[test]
fn losses_on_the_threads_of_a_learner_are_scaled_from_the_first_on() {
    let _turn = turn();
    let mut network = Network::new(60.0);
    for scale in [
        65_536.0, 32_768.0, 16_384.0, 8_192.0, 4_096.0, 2_048.0, 1_024.0, 1_024.0,
    ] {
        assert_eq!(network.scaler.scale(), scale);
        let fork = || network.model.clone().fork(&Default::default());
        let gradients = thread::scope(|scope| {
            let worker = scope.spawn(|| {
                let model = fork();
                let x = Tensor::<B, 2>::ones([1, 1], &Default::default());
                let loss = model.forward(x).mean() * network.factor;
                GradientsParams::from_grads(loss.backward(), &model)
            });
            worker.join().unwrap()
        });
        let model = network.model.clone();
        network.model = network.update.step(1e-3, model, gradients).unwrap();
    }
    assert_eq!(network.scaler.skipped_steps(), 6);
    thread::scope(|scope| scope.spawn(|| train_by_hand(&mut || ())).join().unwrap());
}

#[test]
fn a_backward_pass_can_be_left_unscaled() {
    let _turn = turn();
    // Before the first step of its optimizer a scaler takes any loss on its thread for its own.
    let network = Network::new(1.0);
    let gradient = |gradients: Gradients| {
        let gradient = network.model.weight.grad(&gradients).unwrap();
        gradient.into_data().iter::<f32>().next().unwrap()
    };
    let loss = || network.loss() * 32_768.0;
    assert_eq!(gradient(loss().backward()), f32::INFINITY);
    assert_eq!(
        gradient(GradScaler::unscaled(|| loss().backward())),
        32_768.0
    );
    assert_eq!(gradient(network.scaler.backward(loss())), f32::INFINITY);
}

#[test]
fn a_model_that_is_trained_on_under_a_new_scaler_uses_it_from_the_first_loss() {
    let _turn = turn();
    let mut first = Network::new(0.5);
    first.step(|_, loss| loss.backward());
    let mut second = Network::new(60.0);
    second.model = first.model.clone();
    // At 65536 the loss of the second overflows.
    second.step(|_, loss| loss.backward());
    assert_eq!((second.taken, second.scaler.scale()), (0, 32_768.0));
    assert_eq!(first.scaler.scale(), 65_536.0);
}

/// A program that makes new parameters after each step, here on the host.
#[test]
fn a_model_whose_parameters_are_made_anew_after_each_step_is_scaled_again_after_one_loss() {
    let _turn = turn();
    let mut network = Network::new(1.0);
    let mut scaled = Vec::new();
    for _ in 0..5 {
        let gradient = {
            let gradients = network.loss().backward();
            let gradient = network.model.weight.grad(&gradients).unwrap();
            let is_finite = gradient.into_data().iter::<f32>().all(f32::is_finite);
            scaled.push(!is_finite);
            // A finite gradient, whatever the scale.
            Tensor::<<B as AutodiffBackend>::InnerBackend, 2>::ones([1, 1], &Default::default())
        };
        let mut gradients = GradientsParams::new();
        gradients.register(network.model.weight.id, gradient);
        let model = network.model.clone();
        let model = network.update.step(1e-3, model, gradients).unwrap();
        network.model.weight = Param::initialized(
            network.model.weight.id,
            Tensor::from_data(model.weight.val().into_data(), &Default::default()).require_grad(),
        );
    }
    // At a scale of 65536 a gradient of 1 is not finite.
    assert_eq!(scaled, [true, false, true, true, true]);
}

/// What is said of losses that may be several scalers'.
struct Lines(Mutex<Vec<(ThreadId, String)>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

impl Log for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let line = (thread::current().id(), record.args().to_string());
        self.0.lock().unwrap().push(line);
    }

    fn flush(&self) {}
}

#[test]
fn a_loss_of_several_scalers_names_the_remedy() {
    let _turn = turn();
    log::set_logger(&LINES).unwrap();
    log::set_max_level(LevelFilter::Warn);
    let said = || {
        let lines = std::mem::take(&mut *LINES.0.lock().unwrap());
        let own = lines
            .iter()
            .filter(|(thread, _)| *thread == thread::current().id());
        own.into_iter()
            .any(|(_, line)| line.contains("`scaler.backward(loss)`"))
    };
    let [mut generator, mut discriminator] = [0.5, 0.25].map(Network::new);
    discriminator.step(|_, loss| loss.backward());
    assert!(said(), "neither model is known yet");
    generator.step(|_, loss| loss.backward());
    said();
    discriminator.step(|_, loss| loss.backward());
    assert!(!said(), "by its parameters it is the discriminator's");
    let both = generator.loss() * discriminator.loss();
    drop(both.clone().backward());
    assert!(said(), "a loss of both");
    drop(generator.scaler.backward(both));
    assert!(!said(), "a loss that says whose it is");

    let collapsed = AmpError::ScaleCollapsed {
        scale: 1.0,
        step: 3,
        parameters: vec!["weight".to_owned()],
        scalers: 2,
    };
    assert!(collapsed.to_string().contains("`scaler.backward(loss)`"));
}
