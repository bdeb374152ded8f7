//! burn_depth: Depth Anything 3, small, on small images. Its camera encoder is not used, so that
//! parameters have no gradient.

use burn::tensor::backend::AutodiffBackend;
use burn_depth::model::depth_anything3::{DepthAnything3, DepthAnything3Config};
use frame::{Dropout, Project, Training, backward, numbers};

struct Depth;

const SIDE: usize = 56;

impl Project for Depth {
    const NAME: &'static str = "burn_depth 0.4.2, Depth Anything 3 small";
    const ROWS: usize = 2;

    fn training<B: AutodiffBackend>(device: B::Device, _: Dropout) -> impl Training<B> {
        let config = DepthAnything3Config {
            image_size: SIDE,
            ..DepthAnything3Config::small()
        };
        let model = DepthAnything3::<B>::new(&device, config);
        frame::steps(model, move |model, step, rows| {
            let images = numbers(&device, step, rows.clone(), [0, 3, SIDE, SIDE]);
            let output = model.infer(images);
            let [_, height, width] = output.depth.dims();
            let target = numbers(&device, 100, rows, [0, height, width]);
            let confidence = output.depth_confidence.expect("two heads");
            let loss = (output.depth - target).square().mean() + confidence.log().square().mean();
            backward(model, loss)
        })
    }
}

fn main() {
    frame::main::<Depth>();
}
