//! PyTorch's autocast on a small network: losses and every gradient, within the low type's
//! rounding.

use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, FloatDType, Int, Tensor, TensorData};
use burn_amp::{Autocast, Bf16, F16, Off, Policy};
use burn_flex::Flex;
use serde_json::Value;
use tests::compare::{relative_error, values};

#[derive(Module, Debug)]
struct Net<B: Backend> {
    linear1: Linear<B>,
    norm: LayerNorm<B>,
    linear2: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn loss(&self, x: Tensor<B, 2>, y: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        let x = self.norm.forward(self.linear1.forward(x));
        let logits = self.linear2.forward(Gelu::new().forward(x));
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, y)
    }
}

fn floats(values: &Value) -> Vec<f32> {
    let values = values.as_array().expect("a list");
    values
        .iter()
        .map(|x| x.as_f64().expect("a number") as f32)
        .collect()
}

fn check<B: AutodiffBackend>(case: &str, epsilon: f32) {
    let text = include_str!("../../golden/amp_mlp.json");
    let golden: Value = serde_json::from_str(text).expect("JSON");
    let golden = &golden["cases"];
    let device = B::Device::default();
    let vector = |name: &str| {
        let data = floats(&golden["params"][name]);
        Tensor::<B, 1>::from_floats(data.as_slice(), &device)
    };
    let mut net = Net::<B> {
        linear1: LinearConfig::new(12, 20).init(&device),
        norm: LayerNormConfig::new(20).init(&device),
        linear2: LinearConfig::new(20, 5).init(&device),
    };
    net.linear1.weight = Param::from_tensor(vector("w1").reshape([12, 20]));
    net.linear1.bias = Some(Param::from_tensor(vector("b1")));
    net.norm.gamma = Param::from_tensor(vector("gamma"));
    net.norm.beta = Some(Param::from_tensor(vector("beta")));
    net.linear2.weight = Param::from_tensor(vector("w2").reshape([20, 5]));
    net.linear2.bias = Some(Param::from_tensor(vector("b2")));

    let x = Tensor::from_data(TensorData::new(floats(&golden["x"]), [16, 12]), &device);
    let y: Vec<i64> = floats(&golden["y"]).into_iter().map(|y| y as i64).collect();
    let y = Tensor::<B, 1, Int>::from_ints(y.as_slice(), &device);
    let loss = net.loss(x, y);
    assert_eq!(loss.dtype(), DType::F32);

    let expected = &golden[case];
    let expected_loss = expected["loss"].as_f64().expect("a loss") as f32;
    let found_loss = values(loss.clone())[0];
    assert!(
        (found_loss - expected_loss).abs() <= epsilon * expected_loss,
        "{case}: loss {found_loss}, PyTorch's {expected_loss}"
    );

    let grads = loss.backward();
    let compare = |name: &str, dtype: DType, found: Vec<f32>| {
        assert_eq!(dtype, DType::F32, "{case}: gradient of {name}");
        let error = relative_error(&found, &floats(&expected["grads"][name]));
        // Sums of 16 rounded terms on both sides.
        assert!(
            error <= 4.0 * epsilon,
            "{case}: gradient of {name} differs by {error}"
        );
    };
    macro_rules! grad {
        ($name:literal, $param:expr) => {
            let grad = $param.grad(&grads).expect($name);
            compare($name, grad.dtype(), values(grad));
        };
    }
    grad!("w1", net.linear1.weight);
    grad!("b1", net.linear1.bias.as_ref().expect("a bias"));
    grad!("gamma", net.norm.gamma);
    grad!("beta", net.norm.beta.as_ref().expect("a bias"));
    grad!("w2", net.linear2.weight);
    grad!("b2", net.linear2.bias.as_ref().expect("a bias"));
}

fn under<B: Backend, P: Policy>(case: &str, low: FloatDType) {
    let epsilon = low.finfo().epsilon as f32;
    if B::supports_dtype(&B::Device::default(), low.into()) {
        check::<Autocast<Autodiff<B>, P>>(case, epsilon);
    }
}

fn bf16<B: Backend>() {
    under::<B, Bf16>("bf16", FloatDType::BF16);
}

fn f16<B: Backend>() {
    under::<B, F16>("f16", FloatDType::F16);
}

tests::on_every_backend!(bf16, f16);

/// To f32 rounding, on Flex alone: CubeCL leaves GELU's derivative to Burn's fallback, whose error
/// is up to 8e-4 with or without this crate. Another law tests that `Off` is the bare backend.
#[test]
fn f32() {
    check::<Autodiff<Flex>>("f32", 2e-6);
    check::<Autocast<Autodiff<Flex>, Off>>("f32", 2e-6);
}
