//! What becomes of a tensor at the end of its scope.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use burn_backend::{DType, Shape};
use burn_decorator::carried::{carry, is_carried};

use crate::record::op::OpInfo;
use crate::record::work::Work;

/// What a scope does with the tensors that were made in it, are still used when it ends and are not
/// its results: what autodiff's tape saved. What a module stores stays under any policy if it is
/// tiny: see [`checkpoint`](crate::checkpoint).
#[derive(Clone, Default)]
#[non_exhaustive]
pub enum Policy {
    /// Evicts them; backward runs their operations again (`torch.utils.checkpoint`).
    #[default]
    Recompute,
    /// Keeps the results of matmuls, convolutions and attention and evicts the rest (PyTorch's
    /// selective activation checkpointing). Less than half of the bytes are saved in a transformer,
    /// and little time is lost.
    KeepCompute,
    /// Moves them to host memory, and back when backward uses them.
    ///
    /// The copies are started at the end of the scope, as one transaction a device on a thread of
    /// their own, and waited for at the use; what is [tiny](crate::checkpoint) stays. While
    /// backward works on one tensor, the two that it will ask for next are uploaded, across scopes;
    /// under a budget none is, for what a budget evicts must not depend on when copies arrive.
    ///
    /// A tensor from the host has the same elements, in memory in the order of its shape. Where it
    /// had another order, such as a sum of transposed tensors, a matmul or a sum over it may differ
    /// by the rounding of f32.
    ///
    /// - **Moves**: every tensor with memory of its own, and the tensors that views are views of.
    /// - **Is computed once more:** views, from the tensor that they are views of; what is new,
    ///   such as zeros.
    /// - **To do:** put the embedding into a scope too. A view of an unmanaged tensor does not
    ///   move.
    ///
    /// # Memory
    ///
    /// Until the scope ends, a view holds the tensor it is a view of, even if nothing else uses
    /// that any more, so that it can move.
    ///
    /// # Errors
    ///
    /// The use of a tensor whose copy could not be read panics with
    /// [`RematError::HostCopyLost`](crate::RematError::HostCopyLost).
    Offload,
    /// Keeps everything, for use inside scopes that evict, and counts it in
    /// [`RematStats`](crate::RematStats) and traces.
    Keep,
    /// Calls a function for each tensor. Made by [`Policy::per_operation`].
    PerOperation(PerOperation),
}

/// What becomes of one tensor at the end of its scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SavePolicy {
    /// It stays.
    Keep,
    /// It is evicted and computed again when it is used.
    Recompute,
    /// It is moved to host memory.
    Offload,
}

/// The call of an operation whose result a [`Policy::per_operation`] decides about. Derefs to its
/// [`OpInfo`]: `call.name`, `call.work`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct OpCall<'a> {
    /// The operation.
    pub op: &'static OpInfo,
    /// Which call of this operation it is in its scope, from 0.
    pub number: u32,
    /// The shape of the result.
    pub shape: &'a Shape,
    /// The type of the result's elements.
    pub dtype: DType,
    /// Bytes of the result.
    pub bytes: u64,
}

impl Deref for OpCall<'_> {
    type Target = OpInfo;

    fn deref(&self) -> &OpInfo {
        self.op
    }
}

/// A function of the calls of a scope.
#[derive(Clone)]
pub struct PerOperation(Arc<dyn Fn(&OpCall<'_>) -> SavePolicy + Send + Sync>);

/// Such a function runs.
struct Asking;

impl Policy {
    /// A policy that calls `save_policy` for each operation that can be run again: once the result
    /// is computed, and, if the result is still used, again at the scope's end, for a view with the
    /// call that made its storage. `save_policy` has to return the same each time. Tensors that it
    /// computes itself are kept without a call.
    ///
    /// ```
    /// use burn_checkpoint::{SavePolicy, Policy, Work};
    ///
    /// // Every second product, and what is small.
    /// let policy = Policy::per_operation(|call| match call.work {
    ///     Work::Compute if call.number % 2 == 0 => SavePolicy::Keep,
    ///     _ if call.bytes < 64 << 10 => SavePolicy::Keep,
    ///     _ => SavePolicy::Recompute,
    /// });
    /// ```
    pub fn per_operation(
        save_policy: impl Fn(&OpCall<'_>) -> SavePolicy + Send + Sync + 'static,
    ) -> Self {
        Self::PerOperation(PerOperation(Arc::new(save_policy)))
    }

    /// Whether results of an operation are sure to stay, known before it runs: it may then write
    /// into its operands.
    #[inline]
    pub(crate) fn keeps(&self, op: &OpInfo) -> bool {
        match self {
            Self::Keep => true,
            Self::KeepCompute => op.work == Work::Compute,
            Self::Recompute | Self::Offload | Self::PerOperation(_) => false,
        }
    }

    /// Whether it calls a function for each call of an operation.
    #[inline]
    pub(crate) fn asks(&self) -> bool {
        matches!(self, Self::PerOperation(_))
    }

    /// What becomes of the result of a call.
    pub fn save_policy(&self, call: &OpCall<'_>) -> SavePolicy {
        match self {
            Self::Offload => SavePolicy::Offload,
            // The function itself runs the operation.
            Self::PerOperation(_) if is_carried::<Asking>() => SavePolicy::Keep,
            Self::PerOperation(policy) => carry(Asking, || (policy.0)(call)).0,
            _ if self.keeps(call.op) => SavePolicy::Keep,
            _ => SavePolicy::Recompute,
        }
    }

    /// Whether it can move anything to host memory.
    #[inline]
    pub(crate) fn may_offload(&self) -> bool {
        matches!(self, Self::Offload | Self::PerOperation(_))
    }

    /// The name in traces.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Recompute => "recompute",
            Self::KeepCompute => "keep-compute",
            Self::Offload => "offload",
            Self::Keep => "keep",
            Self::PerOperation(_) => "per-operation",
        }
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
