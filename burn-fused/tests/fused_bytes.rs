//! What norms, activations, softmax, attention and SwiGLU keep on the heap until backward, as one
//! operation each.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::tensor::activation::{gelu, log_softmax, relu, sigmoid, softmax};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::module::{attention, linear};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{DType, Distribution, Tensor, TensorPrimitive};
use burn_amp::Autocast;
use burn_flex::Flex;
use burn_fused::{FusedBackward, rms_norm, silu, swiglu};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type Plain = Autodiff<Flex>;
type Fused = FusedBackward<Autodiff<Flex>>;
type Balanced = FusedBackward<Autodiff<Flex, BalancedCheckpointing>>;

#[derive(Clone, Copy, Debug)]
enum Operation {
    LayerNorm,
    RmsNorm,
    SwiGlu,
    Silu,
    Softmax,
    LogSoftmax,
    Relu,
    Sigmoid,
    Gelu,
    Attention,
}

use Operation::*;

impl Operation {
    fn run<B: Backend>(self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let is_tracked = B::ad_enabled(&x.device());
        let gamma = Tensor::<B, 1>::ones([64], &x.device()).set_require_grad(is_tracked);
        let weight = Tensor::<B, 2>::ones([64, 64], &x.device()).set_require_grad(is_tracked);
        match self {
            LayerNorm => {
                let [x, gamma] =
                    [x.into_primitive(), gamma.into_primitive()].map(TensorPrimitive::tensor);
                Tensor::from_primitive(TensorPrimitive::Float(B::layer_norm(x, gamma, None, 1e-5)))
            }
            RmsNorm => rms_norm(x, gamma, 1e-5),
            SwiGlu => swiglu(x.clone() * 0.5, x),
            Silu => silu(x),
            Softmax => softmax(x, 3),
            LogSoftmax => log_softmax(x, 3),
            Relu => linear(relu(x), weight, None),
            Sigmoid => linear(sigmoid(x), weight, None),
            Gelu => linear(gelu(x), weight, None),
            Attention => attention(
                x.clone(),
                x.clone(),
                x,
                None,
                None,
                AttentionModuleOptions::default(),
            ),
        }
    }

    /// What is there after the operation on a tensor of this type beyond what was before the
    /// tensor, in elements of the tensor, four bytes each. The tensor is in it if the operation
    /// keeps it, and so is the result.
    fn kept<B: AutodiffBackend>(self, dtype: DType) -> f64 {
        let device = Default::default();
        let leaf =
            Tensor::<B, 4>::random([2, 8, 64, 64], Distribution::Default, &device).require_grad();
        let kept = || {
            let before = HEAP.current_usage();
            let result = self.run((leaf.clone() * 1.5).cast(dtype));
            let kept = HEAP.current_usage().saturating_sub(before);
            assert!(leaf.grad(&result.sum().backward()).is_some());
            kept
        };
        // Worker threads make room for their kernels in their first runs, and give it back late.
        let least = (0..5).map(|_| kept()).min().expect("five runs");
        least as f64 / (4 * leaf.shape().num_elements()) as f64
    }
}

#[test]
fn fewer_bytes_are_kept() {
    let expected = [
        // The operand and the result.
        (LayerNorm, 2.0),
        (RmsNorm, 2.0),
        // The operands and the result.
        (SwiGlu, 3.0),
        // The operand and the result.
        (Silu, 2.0),
        (Softmax, 1.0),
        (LogSoftmax, 1.0),
        // What the linear layer after it keeps, and that layer's result.
        (Relu, 2.0),
        (Sigmoid, 2.0),
        // The operand, three times the same, and the result.
        (Attention, 2.0),
    ];
    for (operation, bytes) in expected {
        let ours = operation.kept::<Fused>(DType::F32);
        let theirs = operation.kept::<Plain>(DType::F32);
        println!("{operation:?} keeps {ours:.2}, not {theirs:.2}");
        assert!((ours - bytes).abs() < 0.1, "{operation:?} {ours}");
        assert!(theirs > 1.45 * ours);
    }
    // The result of the linear layer: GELU's, and its operand, a product with a number, are computed
    // again.
    let gelu = Gelu.kept::<Balanced>(DType::F32);
    println!("GELU over Burn's strategy keeps {gelu:.2}");
    assert!((gelu - 1.0).abs() < 0.1, "GELU {gelu}");
    let ours = Attention.kept::<Autocast<Fused>>(DType::BF16);
    let theirs = Attention.kept::<Autocast<Plain>>(DType::BF16);
    println!("attention under autocast keeps {ours:.2}, not {theirs:.2}");
    assert!((ours - 1.0).abs() < 0.1, "half of f32's: {ours}");
    assert!(theirs > 3.0 * ours, "{theirs}");
}
