//! A list of blocks in a few scopes.

use crate::Outputs;
use crate::scope::checkpoint::checkpoint_labelled;
use crate::scope::policy::Policy;

/// Runs `blocks` one after the other, in `segments` scopes of nearly equal length
/// (`torch.utils.checkpoint_sequential`). Loss and gradients are bit for bit those of the plain
/// loop.
///
/// `forward` runs one block. A block may take and return whatever a scope may return ([`Outputs`]):
/// one tensor, or a tuple of hidden states and a mask. Let the closure capture what is the same for
/// all blocks.
///
/// A scope holds its input, and in backward the tape of its blocks: where all blocks are alike, a
/// number of segments near the square root of the number of blocks takes the least memory. More
/// segments than blocks are one for each block. A [`MemoryBudget`](crate::MemoryBudget) chooses by
/// itself what to recompute.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
/// use burn_checkpoint::{Remat, checkpoint_sequential};
/// use burn_flex::Flex;
///
/// type B = Autodiff<Remat<Flex>>;
///
/// let device = Default::default();
/// let blocks: Vec<Linear<B>> = (0..9).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
/// let x = Tensor::<B, 2>::ones([32, 64], &device);
/// let forward = |block: &Linear<B>, x| burn::tensor::activation::gelu(block.forward(x));
///
/// let y = checkpoint_sequential(&blocks, 3, x, forward);
/// let grads = y.sum().backward();
/// # assert!(blocks[0].weight.grad(&grads).is_some());
/// ```
///
/// # Panics
///
/// If `segments` is 0.
pub fn checkpoint_sequential<Block, T: Outputs>(
    blocks: &[Block],
    segments: usize,
    x: T,
    forward: impl Fn(&Block, T) -> T,
) -> T {
    assert!(segments > 0, "blocks run in at least one segment");
    let segments = segments.min(blocks.len());
    let mut output = x;
    for segment in 0..segments {
        let begin = segment * blocks.len() / segments;
        let end = (segment + 1) * blocks.len() / segments;
        let label = match end - begin {
            1 => format!("block {begin}"),
            _ => format!("blocks {begin}-{}", end - 1),
        };
        let of_segment = &blocks[begin..end];
        output = checkpoint_labelled(label, Policy::Recompute, || {
            of_segment.iter().fold(output, |x, block| forward(block, x))
        });
    }
    output
}
