//! What checking the gradients costs: an AdamW step over 4 million parameters, plain, under a scaler
//! and under a disabled one. Backward is not part of it, so on a device queue the wait for the read
//! shows only in a whole step.
#![allow(missing_docs)] // criterion_group

use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    nn::{Linear, LinearConfig},
    optim::{AdamWConfig, GradientsParams},
    tensor::{Distribution, Tensor},
};
use burn_amp::GradScalerConfig;
use burn_flex::Flex;
use burn_update::Update;
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

fn measure(criterion: &mut Criterion, name: &str, mut update: Update<Layers, B>) {
    let layer = || LinearConfig::new(512, 512).init(&Default::default());
    let mut model: Option<Layers> = Some((0..16).map(|_| layer()).collect());
    criterion.bench_function(name, |bencher| {
        let template = model.clone().expect("a model between steps");
        bencher.iter_batched(
            || gradients(&template),
            |gradients| {
                let before = model.take().expect("a model between steps");
                model = Some(update.step(1e-3, before, gradients).expect("a step"));
            },
            BatchSize::LargeInput,
        );
    });
}

fn step(criterion: &mut Criterion) {
    let update = || Update::new(AdamWConfig::new().init());
    measure(criterion, "adamw plain", update());
    let scales = [
        ("adamw disabled", GradScalerConfig::disabled()),
        ("adamw scaled", GradScalerConfig::default()),
    ];
    for (name, config) in scales {
        let scaled = update().scale(config).expect("a valid configuration");
        measure(criterion, name, scaled);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = step
}
criterion_main!(benches);
