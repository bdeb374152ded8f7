//! Autocast through the patch: PyTorch's golden network and training, with the numbers and
//! tolerances of the 0.21 tests. One process-wide precision: the tests take turns.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::optim::{AdamWConfig, GradientsAccumulator, GradientsParams};
use burn::tensor::activation::softmax;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_decorated::{
    AmpConfig, Bf16, GradScaler, GradScalerConfig, ScaledOptimizer, autocast, checkpoint,
};
use serde::Deserialize;
use serde_json::Value;

fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn device() -> Device {
    Device::flex().autodiff()
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor
        .into_data_as::<f32>()
        .try_into_vec::<f32>()
        .expect("f32")
}

fn param<const D: usize>(values: &[f32], shape: [usize; D]) -> Param<Tensor<D>> {
    let data = TensorData::new(values.to_vec(), shape);
    Param::from_tensor(Tensor::from_data(data, &device()))
}

fn linear(weight: &[f32], bias: &[f32]) -> Linear {
    let (outputs, inputs) = (bias.len(), weight.len() / bias.len());
    let mut linear = LinearConfig::new(inputs, outputs).init(&device());
    linear.weight = param(weight, [inputs, outputs]);
    linear.bias = Some(param(bias, [outputs]));
    linear
}

fn norm(gamma: &[f32], beta: &[f32]) -> LayerNorm {
    let mut norm = LayerNormConfig::new(gamma.len()).init(&device());
    norm.gamma = param(gamma, [gamma.len()]);
    norm.beta = Some(param(beta, [beta.len()]));
    norm
}

fn floats(values: &Value) -> Vec<f32> {
    let values = values.as_array().expect("a list").iter();
    values
        .map(|x| x.as_f64().expect("a number") as f32)
        .collect()
}

fn cross_entropy(logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    loss.forward(logits, targets)
}

/// PyTorch's autocast on a small network: the loss and every gradient, within the low type's
/// rounding.
fn golden_mlp(case: &str, config: AmpConfig, epsilon: f32) {
    let _turn = turn();
    config.install().expect("no operations are named");
    let text = include_str!("../../../tests/golden/amp_mlp.json");
    let golden: Value = serde_json::from_str(text).expect("JSON");
    let golden = &golden["cases"];
    let weights = |name: &str| floats(&golden["params"][name]);
    let linear1 = linear(&weights("w1"), &weights("b1"));
    let layer_norm = norm(&weights("gamma"), &weights("beta"));
    let linear2 = linear(&weights("w2"), &weights("b2"));
    let x = TensorData::new(floats(&golden["x"]), [16, 12]);
    let y: Vec<i64> = floats(&golden["y"]).into_iter().map(|y| y as i64).collect();
    let hidden = linear1.forward(Tensor::<2>::from_data(x, &device()));
    let lowered = if case == "f32" {
        DType::F32
    } else {
        DType::from(low(case))
    };
    assert_eq!(hidden.dtype(), lowered);
    let logits = linear2.forward(Gelu::new().forward(layer_norm.forward(hidden)));
    let loss = cross_entropy(logits, Tensor::from_ints(y.as_slice(), &device()));
    assert_eq!(loss.dtype(), DType::F32);
    let expected = &golden[case];
    let expected_loss = expected["loss"].as_f64().expect("a loss") as f32;
    let found = values(loss.clone())[0];
    let apart = (found - expected_loss).abs();
    assert!(
        apart <= epsilon * expected_loss,
        "{case}: {found}, PyTorch's {expected_loss}"
    );
    let grads = loss.backward();
    let compare = |name: &str, dtype: DType, found: Vec<f32>| {
        assert_eq!(dtype, DType::F32, "{case}: gradient of {name}");
        let expected = floats(&expected["grads"][name]);
        assert_eq!(found.len(), expected.len());
        let largest = expected.iter().fold(0_f32, |max, x| max.max(x.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            // Sums of 16 rounded terms on both sides.
            let error = (found - expected).abs() / largest;
            assert!(
                error <= 4.0 * epsilon,
                "{case}: gradient of {name} differs by {error}"
            );
        }
    };
    macro_rules! grad {
        ($name:literal, $param:expr) => {
            let grad = $param.val().grad(&grads).expect($name);
            compare($name, grad.dtype(), values(grad));
        };
    }
    grad!("w1", linear1.weight);
    grad!("b1", linear1.bias.as_ref().expect("a bias"));
    grad!("gamma", layer_norm.gamma);
    grad!("beta", layer_norm.beta.as_ref().expect("a bias"));
    grad!("w2", linear2.weight);
    grad!("b2", linear2.bias.as_ref().expect("a bias"));
    AmpConfig::off().install().expect("no operations are named");
}

fn low(case: &str) -> burn::tensor::FloatDType {
    match case {
        "bf16" => burn::tensor::FloatDType::BF16,
        _ => burn::tensor::FloatDType::F16,
    }
}

#[test]
fn the_golden_mlp() {
    golden_mlp("f32", AmpConfig::off(), 2e-6);
    golden_mlp(
        "bf16",
        AmpConfig::bf16(),
        low("bf16").finfo().epsilon as f32,
    );
    golden_mlp("f16", AmpConfig::f16(), low("f16").finfo().epsilon as f32);
}

#[derive(Deserialize)]
struct Golden {
    #[serde(rename = "V")]
    vocabulary: usize,
    #[serde(rename = "T")]
    positions: usize,
    #[serde(rename = "D")]
    width: usize,
    #[serde(rename = "H")]
    heads: usize,
    #[serde(rename = "B")]
    batch: usize,
    #[serde(rename = "A")]
    micro_batches: usize,
    params: Weights,
    data: Vec<i64>,
    f32: Run,
    bf16: Run,
    f16: Run,
}

#[derive(Deserialize)]
struct Run {
    losses: Vec<f32>,
    norms: Vec<f32>,
}

#[derive(Deserialize)]
struct Weights {
    emb: Vec<f32>,
    pos: Vec<f32>,
    head: LinearWeights,
    lnf: NormWeights,
    blocks: Vec<BlockWeights>,
}

#[derive(Deserialize)]
struct LinearWeights {
    w: Vec<f32>,
    b: Vec<f32>,
}

#[derive(Deserialize)]
struct NormWeights {
    g: Vec<f32>,
    b: Vec<f32>,
}

#[derive(Deserialize)]
struct BlockWeights {
    ln1: NormWeights,
    ln2: NormWeights,
    q: LinearWeights,
    k: LinearWeights,
    v: LinearWeights,
    o: LinearWeights,
    f1: LinearWeights,
    f2: LinearWeights,
}

#[derive(Module, Debug)]
struct Transformer {
    embedding: Embedding,
    positions: Param<Tensor<2>>,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

#[derive(Module, Debug)]
struct Block {
    norm1: LayerNorm,
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    norm2: LayerNorm,
    up: Linear,
    down: Linear,
    heads: usize,
}

impl Transformer {
    fn of(golden: &Golden) -> Self {
        let (weights, width) = (&golden.params, golden.width);
        let mut embedding = EmbeddingConfig::new(golden.vocabulary, width).init(&device());
        embedding.weight = param(&weights.emb, [golden.vocabulary, width]);
        let normed = |from: &NormWeights| norm(&from.g, &from.b);
        let dense = |from: &LinearWeights| linear(&from.w, &from.b);
        let block = |from: &BlockWeights| Block {
            norm1: normed(&from.ln1),
            query: dense(&from.q),
            key: dense(&from.k),
            value: dense(&from.v),
            output: dense(&from.o),
            norm2: normed(&from.ln2),
            up: dense(&from.f1),
            down: dense(&from.f2),
            heads: golden.heads,
        };
        Self {
            embedding,
            positions: param(&weights.pos, [golden.positions, width]),
            blocks: weights.blocks.iter().map(block).collect(),
            norm: normed(&weights.lnf),
            head: dense(&weights.head),
        }
    }

    fn loss(&self, tokens: Tensor<2, Int>) -> Tensor<1> {
        let [batch, length] = tokens.dims();
        let positions = length - 1;
        let inputs = tokens.clone().slice([0..batch, 0..positions]);
        let targets = tokens.slice([0..batch, 1..length]);
        let mut x = self.embedding.forward(inputs) + self.positions.val().unsqueeze();
        for block in &self.blocks {
            // Both decorators at once: what is recomputed is cast as it was.
            x = checkpoint(|| block.forward(x));
        }
        let logits = self.head.forward(self.norm.forward(x));
        let [_, _, classes] = logits.dims();
        let rows = batch * positions;
        cross_entropy(logits.reshape([rows, classes]), targets.reshape([rows]))
    }
}

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let attended = self.attention(self.norm1.forward(x.clone()));
        let x = x + attended;
        let hidden = Gelu::new().forward(self.up.forward(self.norm2.forward(x.clone())));
        x + self.down.forward(hidden)
    }

    fn attention(&self, x: Tensor<3>) -> Tensor<3> {
        let [batch, length, width] = x.dims();
        let head = width / self.heads;
        let split = |x: Tensor<3>| x.reshape([batch, length, self.heads, head]).swap_dims(1, 2);
        let query = split(self.query.forward(x.clone()));
        let key = split(self.key.forward(x.clone()));
        let value = split(self.value.forward(x.clone()));
        let scores = query.matmul(key.swap_dims(2, 3)) / (head as f64).sqrt();
        let future = Tensor::<2>::ones([length, length], &x.device())
            .triu(1)
            .bool();
        let future = future
            .unsqueeze::<4>()
            .expand([batch, self.heads, length, length]);
        let weights = softmax(scores.mask_fill(future, -1e4), 3);
        let mixed = weights.matmul(value).swap_dims(1, 2);
        self.output.forward(mixed.reshape([batch, length, width]))
    }
}

/// The sum of squares of all gradients.
struct Squares<'a>(&'a GradientsParams, f64);

impl ModuleVisitor for Squares<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.0.get::<D>(param.id) {
            assert_eq!(grad.dtype(), DType::F32);
            self.1 += f64::from(values((grad.clone() * grad).sum())[0]);
        }
    }
}

/// Multiplies all gradients.
struct Times<'a>(&'a mut GradientsParams, f64);

impl ModuleVisitor for Times<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.0.remove::<D>(param.id) {
            self.0.register(param.id, grad * self.1);
        }
    }
}

/// The largest relative differences of the losses and of the gradients' norms from PyTorch's.
fn differences(golden: &Golden, expected: &Run, scaler: GradScaler) -> (f32, f32) {
    let mut model = Transformer::of(golden);
    let adamw = AdamWConfig::new()
        .with_beta_2(0.98)
        .with_epsilon(1e-8)
        .with_weight_decay(0.05);
    let mut optimizer = ScaledOptimizer::new(adamw.build(), scaler);
    let mut window = GradientsAccumulator::new();
    let relative = |found: f32, expected: f32| (found - expected).abs() / expected;
    let length = golden.positions + 1;
    let (mut of_losses, mut of_norms) = (0.0_f32, 0.0_f32);
    let micro_batches = golden.data.chunks(golden.batch * length);
    for (step, (tokens, expected_loss)) in micro_batches.zip(&expected.losses).enumerate() {
        let tokens = TensorData::new(tokens.to_vec(), [golden.batch, length]);
        let loss = model.loss(Tensor::from_data(tokens, &device()));
        of_losses = of_losses.max(relative(values(loss.clone())[0], *expected_loss));
        window.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
        if (step + 1) % golden.micro_batches == 0 {
            let mut grads = window.grads();
            model.visit(&mut Times(&mut grads, 1.0 / golden.micro_batches as f64));
            let mut squares = Squares(&grads, 0.0);
            model.visit(&mut squares);
            let norm = squares.1.sqrt();
            let expected = expected.norms[step / golden.micro_batches];
            of_norms = of_norms.max(relative(norm as f32, expected));
            if norm > 1.0 {
                model.visit(&mut Times(&mut grads, 1.0 / (norm + 1e-6)));
            }
            model = optimizer.step(3e-3, model, grads);
        }
    }
    (of_losses, of_norms)
}

fn scaler(init_scale: f32) -> GradScaler {
    let config = GradScalerConfig {
        init_scale,
        ..Default::default()
    };
    GradScaler::new(&config).expect("a valid scale")
}

/// The tolerances are those of `tests/tests/golden_training.rs`, which trains the same on 0.21.
#[test]
fn the_golden_training() {
    let _turn = turn();
    let text = include_str!("../../../tests/golden/transformer.json");
    let golden: Golden = serde_json::from_str(text).expect("the golden numbers");
    for (config, scale, expected, tolerance) in [
        (AmpConfig::off(), 1.0, &golden.f32, (1e-5, 1e-5)),
        (AmpConfig::bf16(), 1.0, &golden.bf16, (4e-3, 2e-2)),
        (AmpConfig::f16(), 1024.0, &golden.f16, (5e-4, 3e-3)),
    ] {
        config.install().expect("no operations are named");
        let scaler = scaler(scale);
        let found = differences(&golden, expected, scaler.clone());
        println!(
            "{config:?}: losses differ by {:e}, norms by {:e}",
            found.0, found.1
        );
        assert_eq!(scaler.scale(), scale, "no step was skipped");
        assert!(
            found.0 <= tolerance.0 && found.1 <= tolerance.1,
            "{config:?}: {found:?}"
        );
    }
    AmpConfig::off().install().expect("no operations are named");
}

/// Where the mark lives: what belongs to autodiff is lowered, what does not, such as gradients and
/// what an optimizer computes from them, is not; and a scope lowers a model without autodiff too.
#[test]
fn what_belongs_to_autodiff_is_lowered() {
    let _turn = turn();
    AmpConfig::bf16()
        .install()
        .expect("no operations are named");
    let plain = Tensor::<2>::ones([4, 4], &Device::flex());
    let recorded = Tensor::<2>::ones([4, 4], &device()).require_grad();
    let square = |x: &Tensor<2>| x.clone().matmul(x.clone());
    assert_eq!(square(&plain).dtype(), DType::F32);
    assert_eq!(square(&recorded).dtype(), DType::BF16);
    assert_eq!(plain.clone().matmul(recorded.clone()).dtype(), DType::BF16);
    let grads = square(&recorded).mean().backward();
    let grad = recorded.grad(&grads).expect("a gradient");
    assert_eq!(square(&grad).dtype(), DType::F32, "Muon's products");
    autocast::<Bf16, _>(|| assert_eq!(square(&plain).dtype(), DType::BF16));
    assert_eq!(square(&plain).dtype(), DType::F32);
    AmpConfig::off().install().expect("no operations are named");
    assert_eq!(square(&recorded).dtype(), DType::F32);
}

/// A step with an infinite gradient changes nothing, bit for bit, and halves the scale.
#[test]
fn an_overflow_is_skipped() {
    struct Bits(Vec<u32>);
    impl ModuleMapper for Bits {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0
                .extend(values(param.val()).into_iter().map(f32::to_bits));
            param
        }
    }
    let bits = |model: &Linear| {
        let mut bits = Bits(Vec::new());
        let _ = model.clone().map(&mut bits);
        bits.0
    };
    let _turn = turn();
    AmpConfig::f16().install().expect("no operations are named");
    let scaler = scaler(65536.0);
    let mut optimizer = ScaledOptimizer::new(AdamWConfig::new().build(), scaler.clone());
    let mut model = linear(&[0.5; 16], &[0.0; 4]);
    let mut step = |model: Linear, factor: f32| {
        let y = model.forward(Tensor::<2>::full([2, 4], factor, &device()));
        let grads = GradientsParams::from_grads(y.mean().backward(), &model);
        optimizer.step(1e-2, model, grads)
    };
    let before = bits(&model);
    model = step(model, 1e4);
    assert_eq!(
        bits(&model),
        before,
        "f16 overflows: a gradient of 1e4 at scale 65536"
    );
    assert_eq!(scaler.scale(), 32768.0);
    model = step(model, 1.0);
    assert_ne!(bits(&model), before);
    assert_eq!(scaler.scale(), 32768.0);
    AmpConfig::off().install().expect("no operations are named");
}
