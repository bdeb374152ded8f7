//! Norms, activations, softmax, attention and SwiGLU as one operation each: the results and
//! gradients of autodiff's composition.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::tensor::activation::{gelu, log_softmax, relu, sigmoid, silu, softmax, softmin};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, DType, Tensor, TensorData, TensorPrimitive};
use burn_amp::{Autocast, Bf16, F16, Off, Policy};
use burn_checkpoint::{MemoryBudget, Remat, apart, checkpoint};
use burn_flex::Flex;
use burn_fused::{FusedBackward, rms_norm, swiglu};

type Plain = Autodiff<Flex>;
type Fused = FusedBackward<Autodiff<Flex>>;
type Recomputed = FusedBackward<Autodiff<Remat<Flex>>>;

const SHAPE: [usize; 4] = [2, 3, 5, 8];

/// Values of a tensor, from a seed.
fn data(seed: u64, shape: impl Into<burn::tensor::Shape>) -> TensorData {
    let shape = shape.into();
    let numbers = (0..shape.num_elements() as u64).map(|index| {
        let bits = (index + 1).wrapping_mul(seed * 2 + 0x9e37_79b9_7f4a_7c15) >> 40;
        (bits as f32 / (1 << 24) as f32 - 0.5) * 4.0
    });
    TensorData::new(numbers.collect::<Vec<_>>(), shape)
}

fn leaf<B: AutodiffBackend, const D: usize>(
    seed: u64,
    shape: [usize; D],
    dtype: DType,
) -> Tensor<B, D> {
    Tensor::from_data(data(seed, shape), (&Default::default(), dtype)).require_grad()
}

/// What is differentiated: each has three operands, of which it may leave some out.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    Softmax(usize),
    LogSoftmax(usize),
    Softmin(usize),
    LayerNorm {
        has_beta: bool,
    },
    RmsNorm,
    SwiGlu,
    Silu,
    Relu,
    Sigmoid,
    Gelu,
    Attention {
        causal: bool,
        keys: usize,
        masked: bool,
        scale: Option<f64>,
    },
}

use Operation::*;

const ALL: [Operation; 18] = [
    Softmax(3),
    Softmax(1),
    LogSoftmax(3),
    LogSoftmax(2),
    Softmin(3),
    LayerNorm { has_beta: true },
    LayerNorm { has_beta: false },
    RmsNorm,
    SwiGlu,
    Silu,
    Relu,
    Sigmoid,
    Gelu,
    Attention {
        causal: false,
        keys: 5,
        masked: false,
        scale: None,
    },
    Attention {
        causal: true,
        keys: 5,
        masked: false,
        scale: Some(0.7),
    },
    Attention {
        causal: true,
        keys: 7,
        masked: false,
        scale: None,
    },
    Attention {
        causal: true,
        keys: 3,
        masked: true,
        scale: None,
    },
    Attention {
        causal: false,
        keys: 4,
        masked: true,
        scale: None,
    },
];

impl Operation {
    fn operands<B: AutodiffBackend>(self, dtype: DType) -> [Tensor<B, 4>; 3] {
        let [batch, heads, _, width] = SHAPE;
        let keys = match self {
            Attention { keys, .. } => keys,
            SwiGlu => SHAPE[2],
            _ => 1,
        };
        let of_keys = [batch, heads, keys, width];
        [
            leaf(1, SHAPE, dtype),
            leaf(2, of_keys, dtype),
            leaf(3, of_keys, dtype),
        ]
    }

    fn run<B: Backend>(self, [x, y, z]: [Tensor<B, 4>; 3]) -> Tensor<B, 4> {
        let row = |x: Tensor<B, 4>| x.slice([0..1, 0..1, 0..1]).reshape([8]);
        let vector = |x: Tensor<B, 4>| row(x).into_primitive().tensor();
        match self {
            Softmax(dim) => softmax(x, dim),
            LogSoftmax(dim) => log_softmax(x, dim),
            Softmin(dim) => softmin(x, dim),
            LayerNorm { has_beta } => {
                let (gamma, beta) = (vector(y), has_beta.then(|| vector(z)));
                let x = x.into_primitive().tensor();
                Tensor::from_primitive(TensorPrimitive::Float(B::layer_norm(x, gamma, beta, 1e-5)))
            }
            RmsNorm => rms_norm(x, row(y), 1e-5),
            SwiGlu => swiglu(x, y),
            Silu => burn_fused::silu(x),
            // The product keeps the activation's result, or asks for it again.
            Relu => relu(x) * y,
            Sigmoid => sigmoid(x) * y,
            Gelu => gelu(gelu(x) * y.clone()) * y,
            Attention {
                causal,
                keys,
                masked,
                scale,
            } => {
                let [batch, heads, queries, _] = x.dims();
                let device = x.device();
                let options = AttentionModuleOptions {
                    scale,
                    softcap: None,
                    is_causal: causal,
                };
                // The first query may attend to no key.
                let mask = masked.then(|| {
                    let shape = [batch, heads, queries, keys];
                    let closed = (0..batch * heads * queries * keys)
                        .map(|index| (index / keys) % queries == 0 || index % 5 == 0);
                    let data = TensorData::new(closed.collect::<Vec<_>>(), shape);
                    Tensor::<B, 4, Bool>::from_data(data, &device)
                });
                attention(x, y, z, mask, None, options)
            }
        }
    }

    /// The result, and the gradients of those operands that are tracked.
    fn differentiate<B: AutodiffBackend>(
        self,
        dtype: DType,
        tracked: [bool; 3],
        scope: bool,
    ) -> Vec<TensorData> {
        self.differentiate_at(self.operands::<B>(dtype), tracked, scope)
    }

    /// At operands of one type, computed in another.
    fn differentiate_in<B: AutodiffBackend>(self, of: DType, dtype: DType) -> Vec<TensorData> {
        let operands = self.operands::<B>(of);
        let operands = operands.map(|x| x.cast(dtype).detach().require_grad());
        self.differentiate_at(operands, [true; 3], false)
    }

    fn differentiate_at<B: AutodiffBackend>(
        self,
        mut operands: [Tensor<B, 4>; 3],
        tracked: [bool; 3],
        scope: bool,
    ) -> Vec<TensorData> {
        for (operand, tracked) in operands.iter_mut().zip(tracked) {
            *operand = operand.clone().set_require_grad(tracked);
        }
        let run = || self.run(operands.clone());
        let result = if scope { checkpoint(run) } else { run() };
        let value = result.clone().into_data();
        let weight = Tensor::<B, 4>::from_data(data(9, result.dims()), &result.device());
        let loss = (result.cast(DType::F32) * weight.cast(DType::F32)).sum();
        if !loss.is_require_grad() && tracked == [false; 3] {
            return vec![value];
        }
        let gradients = loss.backward();
        let gradients = operands.iter().filter_map(|x| x.grad(&gradients));
        std::iter::once(value)
            .chain(gradients.map(|x| x.into_data()))
            .collect()
    }
}

/// Largest difference, of the largest number.
fn difference(ours: &[TensorData], theirs: &[TensorData]) -> f64 {
    assert_eq!(ours.len(), theirs.len(), "as many gradients");
    let mut most = 0.0_f64;
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert_eq!((&ours.shape, ours.dtype), (&theirs.shape, theirs.dtype));
        let largest = theirs
            .iter::<f64>()
            .fold(0.0, |most: f64, x| most.max(x.abs()));
        for (ours, theirs) in ours.iter::<f64>().zip(theirs.iter::<f64>()) {
            assert!(ours.is_finite() && theirs.is_finite());
            most = most.max((ours - theirs).abs() / largest.max(1e-3));
        }
    }
    most
}

#[test]
fn results_and_gradients_are_those_of_autodiff() {
    let tolerances = [(DType::F64, 1e-12), (DType::F32, 1e-5)];
    for operation in ALL {
        for (dtype, tolerance) in tolerances {
            let ours = operation.differentiate::<Fused>(dtype, [true; 3], false);
            let theirs = operation.differentiate::<Plain>(dtype, [true; 3], false);
            let difference = difference(&ours, &theirs);
            assert!(
                difference <= tolerance,
                "{operation:?} in {dtype:?}: {difference:e}"
            );
        }
    }
}

/// In a low type they are no further from f64's than autodiff's are, but for a rounding of the
/// result.
#[test]
fn in_a_low_type_they_are_no_less_precise() {
    for operation in ALL {
        for (dtype, rounding) in [(DType::F16, 1e-3), (DType::BF16, 8e-3)] {
            let exact = operation.differentiate_in::<Plain>(dtype, DType::F64);
            let error = |results: Vec<TensorData>| {
                let results: Vec<_> = results.into_iter().map(|x| x.convert::<f64>()).collect();
                difference(&results, &exact)
            };
            let ours = error(operation.differentiate::<Fused>(dtype, [true; 3], false));
            let theirs = error(operation.differentiate::<Plain>(dtype, [true; 3], false));
            assert!(
                ours <= theirs + rounding,
                "{operation:?} in {dtype:?}: {ours:e}, not {theirs:e}"
            );
        }
    }
}

#[test]
fn an_operand_that_is_not_tracked_has_no_gradient_and_takes_none() {
    for operation in ALL {
        for number in 0..8 {
            let tracked = [number & 1 > 0, number & 2 > 0, number & 4 > 0];
            let ours = operation.differentiate::<Fused>(DType::F32, tracked, false);
            let theirs = operation.differentiate::<Plain>(DType::F32, tracked, false);
            assert!(
                difference(&ours, &theirs) < 1e-5,
                "{operation:?} {tracked:?}"
            );
        }
    }
}

#[test]
fn recomputed_are_bit_for_bit_those_that_are_kept() {
    for operation in ALL {
        let kept = operation.differentiate::<Fused>(DType::F32, [true; 3], false);
        for scope in [false, true] {
            let recomputed = operation.differentiate::<Recomputed>(DType::F32, [true; 3], scope);
            assert_eq!(kept, recomputed, "{operation:?} {scope}");
            let _apart = apart();
            let _budget = MemoryBudget::bytes(1).install();
            let evicted = operation.differentiate::<Recomputed>(DType::F32, [true; 3], scope);
            assert_eq!(kept, evicted, "{operation:?} {scope}, a budget");
        }
    }
}

#[test]
fn over_burns_own_checkpointing() {
    type Balanced = FusedBackward<Autodiff<Flex, BalancedCheckpointing>>;
    for operation in ALL {
        let ours = operation.differentiate::<Balanced>(DType::F32, [true; 3], false);
        let theirs = operation.differentiate::<Fused>(DType::F32, [true; 3], false);
        assert_eq!(ours, theirs, "{operation:?}");
    }
}

/// The gradients of the weights of two losses: the second is made of a result of the first one's
/// graph, whose backward pass is over by then.
fn two_losses<B: AutodiffBackend>(operation: fn(Tensor<B, 2>) -> Tensor<B, 2>) -> [TensorData; 2] {
    let [x, first, second] = [1, 2, 3].map(|seed| leaf::<B, 2>(seed, [8, 8], DType::F32));
    let features = operation(x.detach().matmul(first.clone()));
    let gradients = features.clone().square().sum().backward();
    let of_first = first.grad(&gradients).expect("a gradient");
    let gradients = features.matmul(second.clone()).sum().backward();
    let of_second = second.grad(&gradients).expect("a gradient");
    [of_first, of_second].map(|gradient| gradient.into_data())
}

#[test]
fn a_result_is_used_after_its_backward_pass() {
    let results = [
        (two_losses::<Fused>(relu), two_losses::<Plain>(relu)),
        (two_losses::<Fused>(sigmoid), two_losses::<Plain>(sigmoid)),
        (two_losses::<Fused>(gelu), two_losses::<Plain>(gelu)),
        (
            two_losses::<Fused>(|x| softmax(x, 1)),
            two_losses::<Plain>(|x| softmax(x, 1)),
        ),
    ];
    for (number, (ours, theirs)) in results.into_iter().enumerate() {
        assert!(difference(&ours, &theirs) < 1e-5, "{number}");
    }
}

/// Under autocast attention is in the low type with its softmax in f32, norms and softmax in f32.
fn under_autocast<P: Policy>(tolerance: f64) {
    for operation in ALL {
        let ours = operation.differentiate::<Autocast<Fused, P>>(DType::F32, [true; 3], false);
        let theirs = operation.differentiate::<Autocast<Plain, P>>(DType::F32, [true; 3], false);
        let difference = difference(&ours, &theirs);
        assert!(
            difference <= tolerance,
            "{} {operation:?}: {difference:e}",
            P::name()
        );
    }
}

#[test]
fn under_autocast_they_are_those_of_autodiff() {
    under_autocast::<Off>(1e-5);
    under_autocast::<F16>(4e-3);
    under_autocast::<Bf16>(3e-2);
}

/// What an operation in f32 reads of a gate's result is the gate's, and a gate's operand that is a
/// product is that product.
fn f32_reads_the_gate<P: Policy>(tolerance: f64) {
    fn results<B: AutodiffBackend>(
        gate: fn(Tensor<B, 2>, Tensor<B, 2>) -> Tensor<B, 2>,
    ) -> Vec<TensorData> {
        let [x, y] = [1, 2].map(|seed| leaf::<B, 2>(seed, [8, 8], DType::F32));
        // Products of matrices, so of the low type.
        let low = || x.clone().matmul(y.clone());
        let of_product = gate(low() * low(), low());
        let norm = rms_norm(gate(low(), low()), Tensor::ones([8], &x.device()), 1e-5);
        let results = [
            gate(low(), low()).sum_dim(1),
            (of_product * 0.5).sum_dim(1),
            norm.sum_dim(1),
        ];
        let loss = results
            .iter()
            .fold(Tensor::zeros([8, 1], &x.device()), |sum, result| {
                sum + result.clone().cast(DType::F32).powi_scalar(2)
            });
        let gradients = loss.sum().backward();
        let gradients = [x, y].map(|x| x.grad(&gradients).expect("a gradient").into_data());
        let values = results.map(|result| result.cast(DType::F32).into_data());
        values.into_iter().chain(gradients).collect()
    }
    let exact = results::<Plain>(|gate, up| silu(gate) * up);
    let ours = results::<Autocast<Fused, P>>(swiglu);
    let difference = difference(&ours, &exact);
    assert!(difference <= tolerance, "{}: {difference:e}", P::name());
}

#[test]
fn an_operation_in_f32_reads_the_gate() {
    f32_reads_the_gate::<Off>(1e-5);
    f32_reads_the_gate::<F16>(1e-2);
    f32_reads_the_gate::<Bf16>(8e-2);
}
