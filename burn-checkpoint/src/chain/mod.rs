//! A chain of blocks, run by a plan.

mod profile;

pub use profile::{profile_chain, profile_tail};

use crate::Outputs;
use crate::plan::{Node, Plan, PlanError};
use crate::policy::Policy;
use crate::scope::checkpoint_labelled;

/// Runs `blocks` one after the other, in the scopes of `plan`. Loss and gradients are bit for bit
/// those of the plain loop.
///
/// `forward` runs one block. A block may take and return whatever a scope may return ([`Outputs`]):
/// one tensor, or a tuple of hidden states and a mask. Let the closure capture what is the same for
/// all blocks.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
/// use burn_checkpoint::plan::{Plan, plan};
/// use burn_checkpoint::{Remat, checkpoint_chain, profile_chain};
/// use burn_flex::Flex;
///
/// type B = Autodiff<Remat<Flex>>;
///
/// let device = Default::default();
/// let blocks: Vec<Linear<B>> = (0..6).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
/// let x = Tensor::<B, 2>::ones([32, 64], &device);
/// let forward = |block: &Linear<B>, x| burn::tensor::activation::gelu(block.forward(x));
///
/// // Once, with a typical batch:
/// let profile = profile_chain(&blocks, x.clone(), forward)?;
/// let schedule = plan(&profile, 256 << 10)?;
/// // In every step:
/// let y = checkpoint_chain(&blocks, x, &schedule, forward)?;
/// let grads = y.sum().backward();
/// # assert!(blocks[0].weight.grad(&grads).is_some());
/// # Ok::<(), burn_checkpoint::plan::PlanError>(())
/// ```
///
/// # Errors
///
/// [`PlanError::Length`], before anything runs, if the plan is for another number of blocks.
pub fn checkpoint_chain<Block, T: Outputs>(
    blocks: &[Block],
    x: T,
    plan: &Plan,
    forward: impl Fn(&Block, T) -> T,
) -> Result<T, PlanError> {
    plan.check(blocks.len())?;
    Ok(run(plan.nodes(), blocks, 0, x, &forward))
}

/// Runs `blocks` one after the other, in `segments` scopes of nearly equal length
/// (`torch.utils.checkpoint_sequential`).
///
/// A scope holds its input, and in backward the tape of its blocks: where all blocks are alike, a
/// number of segments near the square root of the number of blocks takes the least memory.
/// [`checkpoint_chain`] runs other nestings.
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
    let plan = Plan::segments(blocks.len(), segments);
    checkpoint_chain(blocks, x, &plan, forward).expect("the plan is for these blocks")
}

/// Runs the blocks from `first` on that are in `nodes`, in the scopes of these.
fn run<Block, T: Outputs>(
    nodes: &[Node],
    blocks: &[Block],
    mut first: usize,
    mut x: T,
    forward: &impl Fn(&Block, T) -> T,
) -> T {
    for node in nodes {
        let length = node.blocks();
        x = match node {
            _ if length == 0 => x,
            Node::Block => forward(&blocks[first], x),
            Node::Scope(inner) => {
                let label = match length {
                    1 => format!("block {first}"),
                    _ => format!("blocks {first}-{}", first + length - 1),
                };
                let inside = || run(inner, blocks, first, x, forward);
                checkpoint_labelled(label, Policy::Recompute, inside)
            }
        };
        first += length;
    }
    x
}
