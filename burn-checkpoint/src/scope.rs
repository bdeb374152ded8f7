//! Scopes: what is made in one and only saved for backward is evicted at its end.

use std::sync::{Arc, Once, Weak};

use crate::context::{self, Frame};
use crate::entry::AnyEntry;
use crate::outputs::{self, Outputs};
use crate::policy::{Policy, SavePolicy};
use crate::region::Region;
use crate::tiny;
use crate::trace::{self, EventKind};
use crate::work::Work;
use crate::{download, verify};

/// Runs `region` and drops what only backward will need of it; backward computes that once more, bit for bit
/// (`torch.utils.checkpoint`).
///
/// Anything may be captured and any tensors returned: see [`Outputs`]. Scopes can be nested. Random numbers are not drawn
/// again: what was drawn is kept.
///
/// # Cost
///
/// One more forward pass of the region during backward. Memory: the region's inputs, its results and its random numbers stay, and
/// what it stores if that is tiny; all else goes. Under a [`MemoryBudget`](crate::MemoryBudget) results are evicted as others are.
///
/// # What a region stores
///
/// What the region's code keeps elsewhere, such as running statistics of a batch norm, stays if it is tiny: if nothing else was computed from it,
/// and it has at most a 16th of the bytes of the largest tensor of the region, the smallest first, together at most a 16th of the bytes of
/// all that the region made. Running statistics are, from 16 values a channel on. Nothing is in a region that made less than 16 KiB.
///
/// What is larger is evicted, for what autodiff saves cannot be told from it. Until it is used, which runs what leads to it once more, it
/// holds what it is computed from, the inputs of the region among it. So what outlives the step is to be returned from the region
/// too, unless it is tiny.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::Tensor;
/// use burn::tensor::activation::gelu;
/// use burn_checkpoint::{Remat, checkpoint};
/// use burn_flex::Flex;
///
/// type B = Autodiff<Remat<Flex>>;
///
/// let device = Default::default();
/// let blocks: Vec<Linear<B>> = (0..4).map(|_| LinearConfig::new(8, 8).init(&device)).collect();
/// let mut x = Tensor::<B, 2>::ones([2, 8], &device);
/// for block in &blocks {
///     x = checkpoint(|| gelu(block.forward(x)));
/// }
/// let grads = x.sum().backward();
/// assert!(blocks[0].weight.grad(&grads).is_some());
/// ```
pub fn checkpoint<R: Outputs>(region: impl FnOnce() -> R) -> R {
    checkpoint_with(Policy::Recompute, region)
}

/// [`checkpoint`] with another [`Policy`].
///
/// # Cost
///
/// Of what the policy evicts, that of [`checkpoint`]. What it keeps costs its bytes, what it offloads a copy each way and as many
/// bytes on the host.
pub fn checkpoint_with<R: Outputs>(policy: Policy, region: impl FnOnce() -> R) -> R {
    run(policy, None, region)
}

/// [`checkpoint_with`], under a name that [`trace`] shows, at the same cost; the name is copied.
pub fn checkpoint_labelled<R: Outputs>(
    label: impl Into<String>,
    policy: Policy,
    region: impl FnOnce() -> R,
) -> R {
    run(policy, Some(label.into()), region)
}

/// Drops the storage of tensors that can come back: those made in a scope that is open, under a budget, or by
/// [`Remat::from_source`](crate::Remat::from_source). Others stay as they are.
///
/// # Cost
///
/// Nothing here; the next use of each brings it back, with what it was computed from.
pub fn evict(tensors: &impl Outputs) {
    let (_, nodes) = outputs::collect(tensors);
    for node in nodes {
        node.clone().rehearse();
        node.evict();
    }
}

fn run<R: Outputs>(policy: Policy, label: Option<String>, region: impl FnOnce() -> R) -> R {
    let open = Open::new(policy, label);
    let results = region();
    open.close(&results);
    results
}

/// Closes the scope whatever happens.
struct Open {
    /// How many were open before; `None` once it is closed.
    depth: Option<usize>,
}

impl Open {
    fn new(policy: Policy, label: Option<String>) -> Self {
        let depth = context::push(|parent| {
            let region = Region::new(policy, label, parent);
            let number = trace::scope_begins(region.label());
            (region, number)
        });
        Self { depth: Some(depth) }
    }

    fn close(mut self, results: &impl Outputs) {
        let (touched, results) = outputs::collect(results);
        if touched > 0 && !context::met() {
            warn_of_no_remat();
        }
        let depth = self.depth.take();
        if let Some(frame) = depth.and_then(context::pop) {
            end(frame, results);
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        // After a panic: the tensors of the scope are being dropped.
        if let Some(depth) = self.depth {
            context::pop(depth);
        }
    }
}

/// Evicts what is neither a result nor unused.
fn end(frame: Frame, mut results: Vec<Arc<dyn AnyEntry>>) {
    let Frame {
        region,
        number,
        nodes,
        sizes,
    } = frame;
    let tiny = sizes.tiny(|| {
        let nodes = nodes.iter().filter_map(Weak::upgrade);
        let ends = nodes.filter(tiny::is_end);
        ends.map(|node| node.storage_bytes())
    });
    let is_tiny = |node: &Arc<dyn AnyEntry>| tiny.contains(&node.storage_bytes());
    let saved = |weak: &Weak<dyn AnyEntry>| {
        let node = weak.upgrade()?;
        // There are few results.
        if results.iter().any(|result| Arc::ptr_eq(result, &node)) {
            return None;
        }
        let save_policy = node.save_policy(&region.policy)?;
        let save_policy = match is_tiny(&node) && tiny::is_end(&node) {
            true => SavePolicy::Keep,
            false => save_policy,
        };
        Some((node, save_policy))
    };
    if verify::is_on() {
        // All of them before any goes: each is replayed from what is resident.
        let goes = nodes.iter().filter_map(saved);
        let goes = goes.filter(|(_, save_policy)| *save_policy != SavePolicy::Keep);
        goes.for_each(|(node, _)| node.rehearse());
    }
    for (node, save_policy) in nodes.iter().filter_map(saved) {
        match save_policy {
            // A view may have a recipe still, and what is tiny has.
            SavePolicy::Keep => node.settle(),
            SavePolicy::Recompute => {
                node.evict();
            }
            SavePolicy::Offload => move_to_host(&node),
        }
    }
    download::start();
    let outer = context::region();
    for result in results.drain(..) {
        if let Some(bytes) = result.leave(&region, outer.as_ref()) {
            context::enlist(Arc::downgrade(&result), bytes);
        }
    }
    context::give_back(nodes, results);
    if trace::is_on() {
        let (scope, label) = (number, region.label().to_owned());
        trace::emit(EventKind::ScopeEnd { scope, label }, 0, 0, None);
    }
}

/// Moves what lies in the order of its shape; what may not is computed once more, for it would come back in another order, which a
/// matmul may add up in another order.
fn move_to_host(node: &Arc<dyn AnyEntry>) {
    let info = node.info();
    if info.op.work == Work::New || info.op.name == "int_into_float" {
        // A copy on the host would cost more than the operation: so are the numbers of dropout made from bits.
        node.evict();
    } else if info.shared || info.permuted {
        // A view comes back as a view, and a reshaped copy as one: what it is of moves, unless that has handles of its own and
        // has moved already.
        if let Some(viewed) = node.restore_viewed()
            && (viewed.info().permuted || !viewed.offload(Arc::downgrade(&viewed)))
        {
            viewed.evict();
        }
        node.evict();
    } else if !node.offload(Arc::downgrade(node)) {
        node.evict();
    }
}

fn warn_of_no_remat() {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        log::warn!(
            "a checkpoint scope returned tensors whose backend has no `Remat` in it: nothing is recomputed and no memory is \
             saved; use `Autodiff<Remat<B>>` in place of `Autodiff<B>`"
        );
    });
}
