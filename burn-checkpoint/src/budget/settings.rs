//! The settings of a memory budget.

use burn_decorator::profile::DeviceProfile;

use crate::error::RematError;

/// A limit on the bytes that managed tensors of a step occupy at one time, for each device.
///
/// While it is installed every operation is recorded. Before an operation would exceed the limit,
/// tensors are evicted: those that are cheap to compute again (with what would have to be computed
/// for that first), large and not used for long. Backward brings them back by using them. Which
/// tensors are evicted depends on shapes alone, so every run and every rank evicts the same ones.
///
/// # What is counted
///
/// What operations make: activations, random numbers, gradients; not what was there before, nor
/// what survives a step (new parameters, optimizer state). Views count once with what they are
/// views of, [`delivered`](crate::delivered()) tensors during their uses.
///
/// # Before it is made
///
/// Room is made before an operation runs, on the device of its result. The result's size is known
/// for new tensors, for data, and for an operation that ran before with these shapes, types and
/// arguments: some thousands of sizes are remembered. The first time the largest operand's is
/// assumed, so the limit may be exceeded by the difference. A result of `bool_argwhere`, sized by
/// its data, is not counted.
///
/// # What does not fit
///
/// A step keeps a limit that has room at any time for what cannot be evicted: gradients, random
/// numbers, what scopes and policies keep; and the operands and the result of the operation under
/// way, with what the replay that it is part of holds. Under a smaller limit the step goes on above
/// it, and the log has the bytes needed of each kind: at the first operation that does not fit, and
/// at the end of a step that needs clearly more. With [`Self::strict`] the operation is refused; if
/// the limit is a fraction, as soon as it is measured.
///
/// # With scopes
///
/// At its end a scope evicts tensors that were made in it; these no longer count. The budget evicts
/// resident tensors: those of open scopes, and results of scopes, which keep their recipes as long
/// as the budget may evict them. It evicts nothing that a scope keeps: by its policy, or because it
/// is tiny (see [`checkpoint`](crate::checkpoint)).
///
/// # Threads
///
/// A budget is the process's, and each thread accounts for itself: ranks that are threads sharing a
/// device may each hold as many bytes as the limit says. Tensors stay in the account of the thread
/// that made them wherever they are used. A step that runs beside a training without being a part
/// of it is [`apart`](crate::apart()).
///
/// # Steps
///
/// What outlives its step is settled: it becomes an ordinary tensor, which has no recipe, is
/// neither evicted nor counted, and keeps nothing of the step that it came from. Backends and
/// optimizers tell where a [backward pass](burn_decorator::gradient::backward) and an
/// [update](burn_decorator::gradient::update) run, whatever the size of the loss. Where none of
/// them does, a budget guesses: a
/// backward pass begins with a tensor `[1]` of ones, an update when an optimizer of Burn compares
/// the devices of a gradient and its parameter. A forward pass begins with the first of: a
/// linear layer, a convolution or attention on anything but gradients; a module or activation
/// function on new parameters; an upload of a batch; a scope. Where a forward pass has none of
/// these, what is left of a step is settled one step later;
/// [`InstalledBudget::step`](crate::InstalledBudget::step) after each update settles it at once.
///
/// Where backward passes are guessed, and in the first step, a forward pass that makes a tensor
/// `[1]` of ones itself is taken for a backward pass from there on: what is computed from that
/// tensor is not recorded until the next scope or upload, so less is evicted. In the first step
/// this ends where the backward pass is told. Values are correct even if a pass is taken for the
/// other.
/// [`RematStats::thrashing_steps`](crate::RematStats::thrashing_steps) counts steps that spend more
/// on replays and searches than on their work, when they or the budget are over; the log warns as
/// soon as this is certain. If one spends 32 times its work, and more than 0.1 s, the limit is
/// doubled, or set to twice what is needed then if that is more, so that the step ends; not if the
/// budget is [strict](Self::strict). It stays raised:
/// [`InstalledBudget::limit_bytes`](crate::InstalledBudget::limit_bytes) returns it.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::Tensor;
/// use burn_checkpoint::{MemoryBudget, Remat, RematStats};
/// use burn_flex::Flex;
///
/// type B = Autodiff<Remat<Flex>>;
///
/// let device = Default::default();
/// let budget = MemoryBudget::bytes(64 * 1024).install();
/// let x = Tensor::<B, 2>::ones([64, 64], &device).require_grad(); // 16 KiB
/// let mut y = x.clone();
/// for _ in 0..10 {
///     y = y.exp().log();
/// }
/// let grads = y.sum().backward();
/// assert!(x.grad(&grads).is_some());
/// assert!(RematStats::of_thread().evicted_operations > 0);
/// drop(budget);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryBudget {
    /// `u64::MAX` if it is a fraction, or without a limit.
    pub(crate) bytes: u64,
    pub(crate) fraction: Option<f64>,
    /// Whether what does not fit panics.
    pub(crate) strict: bool,
    /// The device whose roofline tells costs; otherwise they are those on one thread of a CPU.
    pub(crate) device: Option<DeviceProfile>,
    pub(crate) retries: bool,
}

impl MemoryBudget {
    /// A limit in bytes.
    pub fn bytes(bytes: u64) -> Self {
        Self {
            bytes,
            fraction: None,
            strict: false,
            device: None,
            retries: false,
        }
    }

    /// No limit: every tensor is recorded and none is evicted. For counters, traces and snapshots
    /// of all tensors; see [`record_all`](crate::record_all()).
    pub fn unlimited() -> Self {
        Self::bytes(u64::MAX)
    }

    /// Whether anything may be evicted.
    pub(crate) fn has_limit(&self) -> bool {
        self.fraction.is_some() || self.bytes < u64::MAX
    }

    /// A limit as a fraction of what the first step occupies at most, forward and backward,
    /// gradients included; not its update, if that is by an optimizer of Burn, nor parameters that
    /// the step draws. That step runs unconstrained; the limit is in force from the second on.
    ///
    /// # Errors
    ///
    /// [`RematError::InvalidFraction`] unless it is above 0 and at most 1.
    pub fn fraction(fraction: f64) -> Result<Self, RematError> {
        let mut budget = Self::unlimited();
        budget.fraction = Some(fraction);
        let is_valid = fraction > 0.0 && fraction <= 1.0;
        let error = RematError::InvalidFraction { fraction };
        is_valid.then_some(budget).ok_or(error)
    }

    /// Panics with [`RematError::BudgetTooSmall`] where an operation does not fit, each time it is
    /// tried, instead of warning and going on above the limit; if the limit is a fraction, as soon
    /// as it is measured and known to be too small.
    pub fn strict(mut self) -> Self {
        self.strict = true;
        self
    }

    /// If the backend panics at once for want of device memory, evicts an eighth of the live bytes
    /// and runs the operation again, until it succeeds or nothing is left to evict. Then the log
    /// has the largest holders, and the panic continues. docs/out-of-memory.md lists the backends
    /// that panic so. Uploads of offloaded tensors are not tried again.
    ///
    /// Ranks that fail at different times evict different tensors, so recipes must not run
    /// collectives.
    ///
    /// # Cost
    ///
    /// Operations keep their operands until they are over, so they cannot write into them.
    pub fn retrying(mut self) -> Self {
        self.retries = true;
        self
    }

    /// Takes the costs of operations and uploads from a device's roofline, in place of those of one
    /// CPU thread: on a GPU a product costs hardly more per byte than a GELU, and an upload far
    /// more. All ranks must be given the same profile: one of the constants, or what one rank
    /// measured.
    ///
    /// ```
    /// use burn_checkpoint::{DeviceProfile, MemoryBudget};
    ///
    /// let budget = MemoryBudget::bytes(8 << 30).costs_on(DeviceProfile::A100);
    /// # let _ = budget;
    /// ```
    pub fn costs_on(mut self, device: DeviceProfile) -> Self {
        self.device = Some(device);
        self
    }
}
