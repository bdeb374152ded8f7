//! Errors, with the values that explain them.

use burn_backend::DType;
use thiserror::Error;

/// Errors of activation recomputation.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum RematError {
    /// A tensor whose copy in host memory could not be made. It is gone: this step cannot go on.
    #[error(
        "the result of `{}`, {:?} of shape {:?}, could not be read to the host: {reason}; another `Policy` \
         recomputes it or keeps it on the device, without a read",
        .result.op, .result.dtype, .result.shape
    )]
    HostCopyLost {
        /// The result.
        result: OpResult,
        /// The backend's error.
        reason: String,
    },
    /// A [`MemoryBudget`](crate::MemoryBudget) that cannot hold what has to be resident at one
    /// time.
    #[error(
        "the memory budget of {} cannot be kept: a step needs at least {}: gradients {}, random numbers and data {}, results \
         that are kept {}, largest operation {} (`{}`: operands and what its replay holds {}, result {}); parameters and \
         optimizer state are not counted",
        size(*.budget_bytes), size(.need.bytes()), size(.need.gradients_bytes), size(.need.random_bytes), size(.need.kept_bytes),
        size(.need.in_use_bytes + .need.result_bytes), .need.op, size(.need.in_use_bytes), size(.need.result_bytes)
    )]
    BudgetTooSmall {
        /// The budget.
        budget_bytes: u64,
        /// The smallest budget that holds it, as far as is known.
        need: Need,
    },
    /// A tensor that is to be [`delivered`](crate::delivered()) on a backend without
    /// [`Remat`](crate::Remat).
    #[error(
        "a tensor of `{backend}` cannot be delivered at each use: there is no `Remat` in this backend; use `Autodiff<Remat<B>>` in place of `Autodiff<B>`"
    )]
    NoRemat {
        /// The backend's name.
        backend: String,
    },
    /// A model for [`checkpoint_units`](crate::checkpoint_units) whose parameters are in fewer than
    /// two repeated blocks.
    #[error(
        "of the {parameters} float parameters of this model {blocks} repeated blocks are found by their paths, and scopes need at \
         least two: a block's path has a number in it, such as `blocks.0`; name the units by `checkpoint_units_by`, or use a \
         `MemoryBudget`, which needs no blocks"
    )]
    NoRepeatedBlocks {
        /// Float parameters of the model.
        parameters: usize,
        /// Repeated blocks that were found.
        blocks: usize,
    },
    /// A parameter for [`checkpoint_units`](crate::checkpoint_units) whose uses `Remat` does not
    /// see.
    #[error(
        "the uses of parameter `{parameter}` on `{backend}` are not seen: there is no `Remat` in this backend; use `Remat` \
         below `Autodiff`"
    )]
    UnitsNotSeen {
        /// The backend's name.
        backend: String,
        /// The path of the first such parameter.
        parameter: String,
    },
    /// A backend for [`checkpoint_units`](crate::checkpoint_units) that keeps casts of parameters
    /// above [`Remat`](crate::Remat).
    #[error(
        "the uses of parameters on `{backend}` are not seen: a second micro-batch uses the casts that `CastCache` has kept; use \
         `Remat<CastCache<..>>`"
    )]
    UnitsHidden {
        /// The backend's name.
        backend: String,
    },
    /// A backend for [`checkpoint_units`](crate::checkpoint_units) that does not tell where its
    /// backward passes begin.
    #[error(
        "`{backend}` does not tell where a backward pass begins, so the scopes of blocks have no end: use \
         `FusedBackward<Autodiff<Remat<B>>>` or `Autocast<Autodiff<Remat<B>>>` in place of `Autodiff<Remat<B>>`, or a `MemoryBudget`"
    )]
    BackwardNotTold {
        /// The backend's name.
        backend: String,
    },
    /// A fraction that is not between 0 and 1.
    #[error("a memory budget of {fraction} of the tape: it must be above 0 and at most 1")]
    InvalidFraction {
        /// The fraction as given.
        fraction: f64,
    },
}

/// The result of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpResult {
    /// The operation.
    pub op: &'static str,
    /// The shape of the result.
    pub shape: Vec<usize>,
    /// The type of its elements.
    pub dtype: DType,
    /// Its number in the order of operations of the thread that made it.
    pub number: u64,
}

/// Bytes that an operation needs, whatever else is evicted, by kind. Each storage is counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// The operation.
    pub op: &'static str,
    /// Gradients: autodiff holds them until they are taken.
    pub gradients_bytes: u64,
    /// What cannot be computed again: random numbers, data from the host, new tensors.
    pub random_bytes: u64,
    /// Whatever else has no recipe: what a scope keeps, by its policy or for being tiny, losses.
    pub kept_bytes: u64,
    /// The operands, and what the replay that the operation belongs to holds for later operations.
    pub in_use_bytes: u64,
    /// The expected bytes of its result.
    pub result_bytes: u64,
}

impl Need {
    /// All of them.
    pub fn bytes(&self) -> u64 {
        self.gradients_bytes
            + self.random_bytes
            + self.kept_bytes
            + self.in_use_bytes
            + self.result_bytes
    }
}

/// Bytes in a readable unit.
pub(crate) fn size(bytes: u64) -> String {
    match bytes as f64 / 1024.0 {
        ..1.0 => format!("{bytes} B"),
        kibibytes @ ..1024.0 => format!("{kibibytes:.1} KiB"),
        kibibytes => format!("{:.1} MiB", kibibytes / 1024.0),
    }
}
