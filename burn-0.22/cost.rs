//! What a step of training costs: the median time of a step of a small transformer with AdamW, in
//! milliseconds. Compiled with the patch and without; run the two in turn, or count instructions:
//! `valgrind --tool=callgrind cost WIDTH TOKENS STEPS` with two numbers of steps, whose difference
//! leaves out what a program does once.

use std::time::Instant;

use burn::module::Module;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Distribution, Tensor};

#[derive(Module, Debug)]
struct Model {
    encoder: TransformerEncoder,
}

/// Prints the median of steps of the size in the arguments, or of two sizes.
pub fn run() {
    let arguments = std::env::args().skip(1);
    let numbers = arguments.map(|number| number.parse().expect("WIDTH TOKENS STEPS"));
    let sizes = match numbers.collect::<Vec<usize>>()[..] {
        [width, tokens, steps] => vec![(width, tokens, steps)],
        _ => vec![(16, 8, 400), (128, 64, 40)],
    };
    for (width, tokens, steps) in sizes {
        let device = Device::flex().autodiff();
        device.seed(1);
        let config = TransformerEncoderConfig::new(width, 4 * width, 4, 4).with_dropout(0.0);
        let mut model = Model {
            encoder: config.init(&device),
        };
        let mut optimizer: ModuleOptimizer = AdamWConfig::new().build().into();
        let x = Tensor::<3>::random([4, tokens, width], Distribution::Default, &device);
        let mut times = Vec::new();
        for _ in 0..steps {
            let start = Instant::now();
            let input = TransformerEncoderInput::new(x.clone());
            let loss = model.encoder.forward(input).powi_scalar(2).mean();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-4, model, grads);
            times.push(start.elapsed().as_secs_f64() * 1e3);
        }
        times.sort_by(f64::total_cmp);
        println!("width {width}: {:.3} ms", times[times.len() / 2]);
    }
}
