//! What a block of a Llama model keeps on the heap from forward to backward, and its parts: the
//! rows of docs/results/2026-11-29-cpu/attention.md. `burn-fused/benches/torch_kept.py` has
//! PyTorch's.

use burn::backend::Autodiff;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Int, Tensor};
use burn_flex::Flex;
use burn_fused::{FusedBackward, rms_norm, silu, swiglu};
use examples::llm::{Architecture, LlmConfig, RotaryScaling, Rotation};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type Plain = Autodiff<Flex>;
type Fused = FusedBackward<Plain>;

const BATCH: usize = 2;
const TIME: usize = 256;

/// What PyTorch saves of such a block (`torch_kept.py`).
const TORCH_BLOCK_MIB: f64 = 21.8;

/// The sizes of SmolLM2-135M, but for the vocabulary.
fn config(layers: usize) -> LlmConfig {
    LlmConfig {
        architecture: Architecture::Llama,
        vocabulary: 16,
        width: 576,
        inner_width: 1536,
        layers,
        heads: 9,
        key_heads: 3,
        head_width: 64,
        context: 2048,
        norm_epsilon: 1e-5,
        rotary_base: 1e5,
        rotary_scaling: RotaryScaling::None,
        is_tied: true,
        has_qkv_bias: false,
        has_output_bias: false,
        has_feed_forward_bias: false,
    }
}

/// The heap that a loss keeps for its backward pass, in bytes.
fn kept<B: AutodiffBackend>(forward: impl Fn() -> Tensor<B, 1>) -> f64 {
    let once = || {
        let before = HEAP.current_usage();
        let loss = forward();
        let kept = HEAP.current_usage().saturating_sub(before);
        loss.backward();
        kept
    };
    // The first run makes the parameters, and worker threads make room for their kernels in it.
    let least = (0..2).map(|_| once()).min();
    least.expect("two runs") as f64
}

/// The mebibytes of one of the blocks.
fn block_mib<B: AutodiffBackend>() -> f64 {
    let device = Default::default();
    let of_layers = |layers| {
        let model = config(layers).init::<B>(&device);
        let tokens = Tensor::<B, 2, Int>::zeros([BATCH, TIME], &device);
        kept(|| model.logits(tokens.clone()).sum())
    };
    (of_layers(3) - of_layers(1)) / 2.0 / f64::from(1 << 20)
}

/// A part of the block.
#[derive(Clone, Copy, Debug)]
enum Part {
    Swish,
    SwiGlu,
    RmsNorm,
    Rotary,
}

impl Part {
    fn run<B: Backend>(self, x: Tensor<B, 4>, rotation: &Rotation<B>) -> Tensor<B, 4> {
        match self {
            Self::Swish => silu(x),
            Self::SwiGlu => swiglu(x.clone() * 0.5, x),
            Self::RmsNorm => {
                let is_tracked = B::ad_enabled(&x.device());
                let gamma = Tensor::ones([x.dims()[3]], &x.device());
                rms_norm(x, gamma.set_require_grad(is_tracked), 1e-5)
            }
            Self::Rotary => rotation.rotate(x),
        }
    }

    /// In tensors of the operand's size.
    fn tensors<B: AutodiffBackend>(self) -> f64 {
        let device = Default::default();
        let shape = [BATCH, 9, TIME, 64];
        let leaf = Tensor::<B, 4>::random(shape, Distribution::Default, &device).require_grad();
        let positions: Vec<_> = (0..TIME).collect();
        let rotation = Rotation::new(&config(1), &positions, TIME, &device);
        let bytes = kept(|| self.run(leaf.clone() * 1.5, &rotation).sum());
        bytes / (4 * leaf.shape().num_elements()) as f64
    }
}

#[test]
fn a_llama_block_keeps_less_than_pytorch_saves() {
    let expected = [
        // gate and up
        (Part::SwiGlu, 2.0),
        (Part::RmsNorm, 1.0),
        // Sine and cosine, which all blocks share.
        (Part::Rotary, 0.0),
        (Part::Swish, 1.0),
    ];
    for (part, tensors) in expected {
        let (ours, theirs) = (part.tensors::<Fused>(), part.tensors::<Plain>());
        println!("{part:?} keeps {ours:.2} tensors, {theirs:.2} without FusedBackward");
        assert!((ours - tensors).abs() < 0.1, "{part:?}: {ours}");
    }
    let (ours, theirs) = (block_mib::<Fused>(), block_mib::<Plain>());
    println!("a block keeps {ours:.2} MiB, {theirs:.2} without FusedBackward");
    assert!(ours < 0.8 * TORCH_BLOCK_MIB, "{ours} MiB");
}
