//! Scopes: tensors that are made in a scope and only saved for backward are evicted at its end.

use std::sync::{Arc, Once, Weak};

use crate::host::download;
use crate::node::entry::AnyEntry;
use crate::observe::trace::{self, EventKind};
use crate::record::context::{self, Frame};
use crate::record::work::Work;
use crate::scope::listed_tensors::ListedTensors;
use crate::scope::outputs::{self, Outputs};
use crate::scope::policy::{Policy, SavePolicy};
use crate::scope::{tiny, units};

/// Runs `region` and drops what only backward will need of it; backward computes that once more,
/// bit for bit (`torch.utils.checkpoint`).
///
/// Anything may be captured and any tensors returned: see [`Outputs`], and [`checkpoint_listing`]
/// for results of other crates' types. Scopes can be nested. Random numbers are kept, not drawn
/// again.
///
/// # Cost
///
/// One more forward pass of the region during backward. Memory: the region's inputs, its results
/// and its random numbers stay, and what it stores if that is tiny; all else is evicted. Under a
/// [`MemoryBudget`](crate::MemoryBudget) results may be evicted too.
///
/// # What a region stores
///
/// A tensor that the region's code stores elsewhere, such as running statistics of a batch norm,
/// stays if it is tiny: nothing else was computed from it, it has at most a 16th of the bytes of
/// the region's largest tensor, and the tiny tensors, the smallest first, together have at most a
/// 16th of all bytes that the region made. Running statistics are tiny from 16 values a channel on.
/// No tensor of a region that made less than 16 KiB is tiny.
///
/// A larger one is evicted, because it looks like the tensors that autodiff saves. Until its next
/// use, which computes it again, it holds what it was computed from, the region's inputs included.
/// So return what outlives the step from the region too, unless it is tiny.
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
/// For evicted tensors that of [`checkpoint`]. Kept tensors cost their bytes, offloaded ones as
/// many on the host and a copy each way.
pub fn checkpoint_with<R: Outputs>(policy: Policy, region: impl FnOnce() -> R) -> R {
    run(policy, None, region, Outputs::touch)
}

/// [`checkpoint_with`], under a name that [`trace`] shows, at the same cost; the name is copied.
pub fn checkpoint_labelled<R: Outputs>(
    label: impl Into<String>,
    policy: Policy,
    region: impl FnOnce() -> R,
) -> R {
    run(policy, Some(label.into()), region, Outputs::touch)
}

/// [`checkpoint_with`], for a result whose type has no [`Outputs`] and cannot have it, because it
/// is of another crate: `list` says which tensors it holds. One that is not listed is evicted with
/// the rest and computed again when it is used.
///
/// # Cost
///
/// That of [`checkpoint_with`].
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::Tensor;
/// use burn::tensor::backend::Backend;
/// use burn_checkpoint::{Policy, Remat, RematStats, checkpoint_listing};
/// use burn_flex::Flex;
///
/// mod of_another_crate {
///     use burn::tensor::{Tensor, backend::Backend};
///
///     pub struct Detected<B: Backend> {
///         pub boxes: Tensor<B, 2>,
///         pub scores: Vec<Tensor<B, 1>>,
///     }
///
///     pub fn detect<B: Backend>(image: Tensor<B, 2>) -> Detected<B> {
///         let boxes = image.exp().sin();
///         let scores = vec![boxes.clone().cos().sum_dim(1).squeeze_dim(1)];
///         Detected { boxes, scores }
///     }
/// }
///
/// type B = Autodiff<Remat<Flex>>;
/// let image = Tensor::<B, 2>::ones([64, 64], &Default::default()).require_grad();
/// let found = checkpoint_listing(
///     Policy::Recompute,
///     || of_another_crate::detect(image.clone()),
///     |found, tensors| {
///         tensors.add(&found.boxes).add(&found.scores);
///     },
/// );
/// let evicted = RematStats::of_thread().evicted_operations;
/// assert!(evicted > 0);
/// let grads = (found.boxes.sum() + found.scores[0].clone().sum()).backward();
/// assert!(image.grad(&grads).is_some());
/// ```
pub fn checkpoint_listing<R>(
    policy: Policy,
    region: impl FnOnce() -> R,
    list: impl FnOnce(&R, &mut ListedTensors),
) -> R {
    run(policy, None, region, |result| {
        list(result, &mut ListedTensors::new());
    })
}

/// Runs something in a scope that keeps its tensors, and whose results are none of the scope around
/// it, which would evict them. For results that cost more to compute again than their bytes are
/// worth, such as gradients that a loss computes in forward.
///
/// ```
/// use burn::tensor::Tensor;
/// use burn_checkpoint::{Remat, checkpoint, keeping};
/// use burn_flex::Flex;
///
/// let x = Tensor::<Remat<Flex>, 1>::ones([4], &Default::default());
/// let y = checkpoint(|| x.clone() + keeping(|| x.clone().exp())); // the exponential stays
/// # let _ = y;
/// ```
pub fn keeping<R>(region: impl FnOnce() -> R) -> R {
    let mut result = None;
    checkpoint_with(Policy::Keep, || {
        result = Some(region());
    });
    result.expect("a scope runs its region")
}

/// Drops the storage of tensors that can come back: those made in a scope that is open, or under a
/// budget. Others stay as they are.
///
/// # Cost
///
/// Nothing here; the next use of each brings it back, with what it was computed from.
pub fn evict(tensors: &impl Outputs) {
    let (_, nodes) = outputs::collect(|| tensors.touch());
    nodes.into_iter().for_each(|node| node.evict());
}

/// Runs a region in a scope. `touch` touches the tensors of its result.
fn run<R>(
    policy: Policy,
    label: Option<String>,
    region: impl FnOnce() -> R,
    touch: impl FnOnce(&R),
) -> R {
    /// A scope of the trace. After a panic it is still open, and closed without its end, because
    /// its tensors are being dropped.
    struct Scope {
        is_open: bool,
        /// How many scopes are around it.
        around: usize,
    }
    impl Drop for Scope {
        fn drop(&mut self) {
            if self.is_open {
                context::drop_scopes_inside_of(self.around);
            }
            if trace::is_on() {
                trace::emit(EventKind::ScopeEnd, 0, 0, None);
            }
        }
    }
    if trace::is_on() {
        let label = label.unwrap_or_else(|| policy.name().to_owned());
        trace::emit(EventKind::ScopeBegin { label }, 0, 0, None);
    }
    let around = context::push(policy, None);
    let mut scope = Scope {
        is_open: true,
        around,
    };
    let results = region();
    let (touched, kept) = outputs::collect(|| touch(&results));
    if touched > 0 && !context::met() {
        static WARNED: Once = Once::new();
        WARNED.call_once(|| {
            burn_decorator::warn_user!(
                "a checkpoint scope returned tensors whose backend has no `Remat` in it: nothing is recomputed and no memory is \
                 saved; use `Autodiff<Remat<B>>` in place of `Autodiff<B>`"
            );
        });
    }
    units::end_inside_of(around + 1, &kept);
    scope.is_open = false;
    if let Some(frame) = context::pop() {
        end(frame, kept);
    }
    results
}

/// Ends a scope: its policy decides about the tensors that are in use and are not results.
pub(crate) fn end(frame: Frame, results: Vec<Arc<dyn AnyEntry>>) {
    let (region, nodes) = (frame.region, frame.nodes);
    let alive = nodes.iter().filter_map(Weak::upgrade);
    let ends = alive.filter(tiny::is_end);
    let tiny = frame.sizes.tiny(ends.map(|node| node.info().owner_bytes));
    let saved = |weak: &Weak<dyn AnyEntry>| {
        let node = weak.upgrade()?;
        // There are few results.
        if results.iter().any(|result| Arc::ptr_eq(result, &node)) {
            return None;
        }
        let save_policy = node.save_policy(&region.policy)?;
        let is_tiny = tiny.contains(&node.info().owner_bytes) && tiny::is_end(&node);
        let decided = if is_tiny {
            SavePolicy::Keep
        } else {
            save_policy
        };
        Some((node, decided))
    };
    for (node, save_policy) in nodes.iter().filter_map(saved) {
        match save_policy {
            // A view may still have a recipe, and a tiny tensor has one.
            SavePolicy::Keep => node.settle(),
            SavePolicy::Recompute => node.evict(),
            SavePolicy::Offload => move_to_host(&node),
        }
    }
    download::start();
    for result in results {
        if let Some(outer) = &region.parent
            && let Some(bytes) = result.leave(&region, Some(outer))
        {
            context::enlist_in(outer, Arc::downgrade(&result), bytes);
        }
        if region.parent.is_none() {
            result.leave(&region, None);
        }
    }
}

/// Moves a tensor with a storage of its own.
fn move_to_host(node: &Arc<dyn AnyEntry>) {
    let info = node.info();
    // A copy on the host would cost more than the operation: dropout makes its numbers from bits by
    // `int_into_float`.
    let is_cheap = info.op.work == Work::New || info.op.name == "int_into_float";
    let moving = if is_cheap {
        None
    } else if info.owns_storage {
        Some(node.clone())
    } else {
        // A view is computed again from the tensor it is a view of. That one moves, unless it has
        // handles of its own and has moved already.
        node.restore_viewed()
    };
    if let Some(moving) = moving
        && !moving.clone().offload()
    {
        moving.evict();
    }
    // Does nothing if it has moved.
    node.evict();
}
