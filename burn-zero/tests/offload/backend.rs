//! Any optimizer on the host's backend is that optimizer on the device, bit for bit where both are the same backend.

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, GradientsParams, MuonConfig, Optimizer, RmsPropConfig,
    SgdConfig,
};
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::DType;
use burn_flex::Flex;
use burn_zero::{ParameterShards, offload};

use super::support::*;

type OnHost = ParameterShards<burn::backend::Autodiff<Flex>>;

/// Both trained for a while, with a pause in the middle in which the offloaded one goes through a file.
fn assert_same<O, H>(name: &str, on_device: O, on_host: H)
where
    O: Optimizer<Net<B>, B>,
    H: Optimizer<OnHost, B>,
{
    for low in [DType::F32, DType::BF16] {
        let initial = Net::new(low);
        let mut on_device = on_device.clone();
        let expected = train(&mut on_device, initial.clone(), 0..12);

        let fresh = offload::<Flex, _>(on_host.clone());
        let mut optimizer = fresh.clone();
        let model = train(&mut optimizer, initial, 0..5);
        let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
        let record = Optimizer::<Net<B>, B>::to_record(&optimizer);
        let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
        let record = Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap();
        let mut resumed = Optimizer::<Net<B>, B>::load_record(fresh, record);
        let on = train(&mut optimizer, model.clone(), 5..12);
        assert_eq!(bits(&expected), bits(&on), "{name}, {low:?}");
        // A bf16 moment is f32 after a record of Burn's, on the device too.
        if low == DType::F32 {
            let resumed = train(&mut resumed, model, 5..12);
            assert_eq!(bits(&expected), bits(&resumed), "{name}, resumed");
        }
    }
}

#[test]
fn sgd_rmsprop_adagrad_adam_and_adamw() {
    let sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    assert_same("sgd", sgd.init(), sgd.init());
    let rms = RmsPropConfig::new();
    assert_same("rmsprop", rms.init(), rms.init());
    let adagrad = AdaGradConfig::new();
    assert_same("adagrad", adagrad.init(), adagrad.init());
    let adam = AdamConfig::new();
    assert_same("adam", adam.init(), adam.init());
    let adamw = AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(0.1)));
    assert_same("adamw", adamw.init(), adamw.init());
}

#[derive(Module, Debug)]
struct Matrices<B: Backend> {
    a: Param<Tensor<B, 2>>,
    b: Param<Tensor<B, 2>>,
}

#[test]
fn muon_meets_whole_matrices() {
    fn run<O: Optimizer<Matrices<B>, B>>(
        mut optimizer: O,
        mut model: Matrices<B>,
    ) -> Vec<Vec<u32>> {
        for step in 0..6 {
            let mut gradients = GradientsParams::new();
            gradients.register(model.a.id, tensor::<Flex, 2>(50 + step, [6, 4]));
            gradients.register(model.b.id, tensor::<Flex, 2>(70 + step, [3, 5]));
            model = optimizer.step(0.02, model, gradients);
        }
        bits(&model)
    }
    let model = Matrices::<B> {
        a: Param::from_tensor(tensor(1, [6, 4])),
        b: Param::from_tensor(tensor(2, [3, 5])),
    };
    let muon = MuonConfig::new();
    let on_host = offload::<Flex, _>(muon.init());
    assert_eq!(run(muon.init(), model.clone()), run(on_host, model));
}
