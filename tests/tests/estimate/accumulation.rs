//! Accumulation on [`Meta`], whose tensors have no values, and which has several devices.

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::Tensor;
use burn_accum::{AccumConfig, Counted};
use burn_estimate::{Kind, Meta, MetaDevice, estimate_on};
use burn_update::Update;

use super::turn;

type B = Autodiff<Meta>;

#[derive(Module, Debug)]
struct TwoHeads<B: burn::tensor::backend::Backend> {
    heads: [Linear<B>; 2],
}

impl TwoHeads<B> {
    fn new(device: &MetaDevice) -> Self {
        let heads = [(); 2].map(|()| LinearConfig::new(64, 64).with_bias(false).init(device));
        Self { heads }
    }

    fn loss(&self, head: usize) -> Tensor<B, 1> {
        let device = self.heads[head].weight.val().device();
        self.heads[head]
            .forward(Tensor::<B, 2>::ones([4, 64], &device))
            .mean()
    }
}

type Windows = Update<TwoHeads<B>, B>;

fn windows(config: AccumConfig) -> Windows {
    let adamw = Update::new(AdamWConfig::new().init());
    adamw.accumulate(config).expect("a window")
}

/// The number of items is read as 0, which is no reason to refuse the step.
#[test]
fn a_window_of_tokens_is_estimated() {
    let _turn = turn();
    let device = MetaDevice::new(11);
    let state = |mut update: Windows, count: fn(Tensor<B, 1>, &TwoHeads<B>) -> GradientsParams| {
        let step = |mut model: TwoHeads<B>| {
            for _ in 0..2 {
                let gradients = count(model.loss(0) + model.loss(1), &model);
                model = update.step(1e-3, model, gradients).expect("a step");
            }
            model
        };
        let (estimate, _) = estimate_on::<B, _>(device, TwoHeads::new(&device), step);
        estimate.bytes_of(Kind::OptimizerState)
    };
    let mean = state(windows(AccumConfig::mean(2)), |loss, model| {
        GradientsParams::from_grads(loss.backward(), model)
    });
    let tokens = state(windows(AccumConfig::tokens(2)), |loss, model| {
        Counted::mean(loss, 8).backward(model)
    });
    assert_eq!(mean, 2 * 2 * 64 * 64 * 4);
    assert_eq!(tokens, mean);
}

/// Burn loads a record to the default device. A parameter without a gradient in the rest of the
/// window is not moved there.
#[test]
fn a_resumed_window_leaves_parameters_where_they_are() {
    let _turn = turn();
    let device = MetaDevice::new(12);
    let step = |update: &mut Windows, model: TwoHeads<B>, head: usize| {
        let gradients = GradientsParams::from_grads(model.loss(head).backward(), &model);
        update.step(1e-3, model, gradients).expect("a step")
    };
    let mut update = windows(AccumConfig::mean(2));
    let model = step(&mut update, TwoHeads::new(&device), 0);
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let bytes = Recorder::<B>::record(&recorder, update.record(), ()).expect("a record");
    let record = Recorder::<B>::load(&recorder, bytes, &Default::default()).expect("its bytes");
    let resumed = windows(AccumConfig::mean(2)).load(record);
    let mut resumed = resumed.expect("a record of the same parts");
    let model = step(&mut resumed, model, 1);
    assert_eq!(resumed.updates(), 1);
    for head in &model.heads {
        assert_eq!(head.weight.val().device(), device);
    }
}
