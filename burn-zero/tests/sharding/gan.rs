//! Two sharded optimizers over one group, in backward passes that reach the parameters of both.

use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_update::UpdateError;
use burn_zero::{Stage, ZeroSettings};

use super::support::*;

const WIDTH: usize = 24;
const STEPS: usize = 3;

type Layers<B> = Vec<Linear<B>>;

/// Several buckets each, of 256 elements.
fn layers<B: Backend>(seed: usize) -> Layers<B> {
    let layer = |layer: usize| {
        let mut linear = LinearConfig::new(WIDTH, WIDTH).init(&Default::default());
        let weights = values(WIDTH * WIDTH, seed + layer);
        let weights = Tensor::<B, 1>::from_data(weights.as_slice(), &Default::default());
        linear.weight = burn::module::Param::from_tensor(weights.reshape([WIDTH, WIDTH]));
        let bias = Tensor::zeros([WIDTH], &Default::default());
        linear.bias = Some(burn::module::Param::from_tensor(bias));
        linear
    };
    (0..3).map(layer).collect()
}

fn forward<B: Backend>(layers: &Layers<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
    layers.iter().fold(x, |x, layer| layer.forward(x).tanh())
}

/// This rank's rows of a batch of four.
fn rows<B: Backend>(step: usize, rank: usize, ranks: usize) -> Tensor<B, 2> {
    let all = values(4 * WIDTH, 100 + step);
    let all = Tensor::<B, 1>::from_data(all.as_slice(), &Default::default()).reshape([4, WIDTH]);
    let own = 4 / ranks;
    all.narrow(0, rank * own, own)
}

/// The generator's step reaches the discriminator's parameters too.
fn train<B: AutodiffBackend>(
    [mut generator, mut discriminator]: [Layers<B>; 2],
    mut optimizers: [impl Optimizer<Layers<B>, B>; 2],
    rank: usize,
    ranks: usize,
) -> [Vec<Vec<f32>>; 2] {
    for step in 0..STEPS {
        let noise = || rows::<B>(step, rank, ranks);
        let loss = forward(&discriminator, forward(&generator, noise())).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &generator);
        generator = optimizers[0].step(0.01, generator, gradients);

        let made = forward(&generator, noise()).detach();
        let real = rows::<B>(STEPS + step, rank, ranks);
        let loss = forward(&discriminator, made).mean() - forward(&discriminator, real).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &discriminator);
        discriminator = optimizers[1].step(0.01, discriminator, gradients);
    }
    [parameters(&generator), parameters(&discriminator)]
}

#[test]
fn a_generator_and_a_discriminator_share_a_group() {
    let adam = || AdamWConfig::new().init();
    let plain = train::<Plain>([layers(1), layers(7)], [adam(), adam()], 0, 1);
    let sharded = on_ranks(2, |group| {
        let settings = ZeroSettings {
            bucket_elements: 256,
            ..ZeroSettings::stage(Stage::Gradients)
        };
        let (rank, ranks) = (group.rank(), group.world_size());
        let update = || over_ranks(AdamWConfig::new().init(), group.clone(), settings.clone());
        let mut optimizers = [update()?, update()?];
        let models = [
            optimizers[0].prepare(layers::<B>(1))?,
            optimizers[1].prepare(layers::<B>(7))?,
        ];
        Ok::<_, UpdateError>(train::<B>(models, optimizers, rank, ranks))
    });
    for (plain, sharded) in plain.iter().zip(&sharded) {
        assert!(distance(plain, sharded) < 2e-5);
    }
}
