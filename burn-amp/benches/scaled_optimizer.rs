//! What checking the gradients costs: an AdamW step over 4 million parameters, plain, under both
//! kinds of detection, and under a disabled scaler. Backward is not part of it, so on a device
//! queue `Sync` shows its stall only in a whole step.
#![allow(missing_docs)] // criterion_group

use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    nn::{Linear, LinearConfig},
    optim::{AdamWConfig, GradientsParams, Optimizer},
    tensor::{Distribution, Tensor},
};
use burn_amp::{Detection, GradScaler};
use burn_flex::Flex;
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};

type B = Autodiff<Flex>;
type Layers = Vec<Linear<B>>;

struct Filler(GradientsParams);

impl ModuleVisitor<B> for Filler {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let device = Default::default();
        let gradient =
            Tensor::<Flex, D>::random(param.val().shape(), Distribution::Default, &device);
        self.0.register(param.id, gradient);
    }
}

fn gradients(model: &Layers) -> GradientsParams {
    let mut filler = Filler(GradientsParams::new());
    model.visit(&mut filler);
    filler.0
}

fn measure(criterion: &mut Criterion, name: &str, mut optimizer: impl Optimizer<Layers, B>) {
    let layer = || LinearConfig::new(512, 512).init(&Default::default());
    let mut model: Option<Layers> = Some((0..16).map(|_| layer()).collect());
    criterion.bench_function(name, |bencher| {
        let template = model.clone().expect("a model between steps");
        bencher.iter_batched(
            || gradients(&template),
            |gradients| {
                let before = model.take().expect("a model between steps");
                model = Some(optimizer.step(1e-3, before, gradients));
            },
            BatchSize::LargeInput,
        );
    });
}

fn step(criterion: &mut Criterion) {
    let adamw = || AdamWConfig::new().init();
    measure(criterion, "adamw plain", adamw());
    measure(
        criterion,
        "adamw disabled",
        GradScaler::disabled().wrap(adamw()),
    );
    for detection in [Detection::Sync, Detection::Deferred] {
        let scaler = GradScaler::default().with_detection(detection);
        measure(
            criterion,
            &format!("adamw {detection:?}"),
            scaler.wrap(adamw()),
        );
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = step
}
criterion_main!(benches);
