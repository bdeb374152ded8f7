//! resnet-burn of tracel-ai/models: a ResNet-18 by its own `TrainStep`.

use burn::tensor::backend::AutodiffBackend;
use burn::train::TrainStep;
use frame::{Dropout, Project, Training};
use resnet_burn::{ClassificationBatch, ResNet};

struct Resnet;

const CLASSES: usize = 10;
const SIDE: usize = 32;

impl Project for Resnet {
    const NAME: &'static str = "resnet-burn 0.2.0, ResNet-18";
    const ROWS: usize = 4;
    const NOT_ADDITIVE: Option<&'static str> = Some("batch statistics are each rank's");

    /// Most of a step with few rows are gradients, which stay.
    const BUDGET: f64 = 0.9;

    fn training<B: AutodiffBackend>(device: B::Device, _: Dropout) -> impl Training<B> {
        let model = ResNet::<B>::resnet18(CLASSES, &device);
        frame::steps(model, move |model, step, rows| {
            let images = frame::numbers(&device, step, rows.clone(), [0, 3, SIDE, SIDE]);
            let targets = frame::integers(&device, step, rows, [0, CLASSES], 2);
            let output = TrainStep::step(model, ClassificationBatch { images, targets });
            (output.item.loss, output.grads)
        })
    }
}

fn main() {
    frame::main::<Resnet>();
}
