//! The settings of a memory budget.

use burn_decorator::profile::DeviceProfile;

use crate::cost::Costs;
use crate::error::RematError;

/// A limit on the bytes that managed tensors of a step occupy at one time, for each device.
///
/// While it is installed every operation of the thread is recorded. Before an operation would exceed the limit, tensors are
/// evicted: those that are cheap to compute again (with what would have to be computed for that first), large and not used for
/// long. Backward brings them back by using them. Which ones depends on shapes alone, so that every run and every rank
/// evicts the same.
///
/// # What is counted
///
/// What operations of the thread make: activations, random numbers, gradients. What was there before, and what survives a
/// step (new parameters, optimizer state), is not counted. Views are counted once with what they are views of. What
/// [`Remat::from_source`](crate::Remat::from_source) delivers counts while it is resident, but is never evicted by a budget, only by
/// [`evict`](crate::evict): delivering may be collective.
///
/// # Before it is made
///
/// Room is made before an operation runs, on the device of its result. How large that will be is known of new tensors, of data, and of
/// an operation that ran before on operands of these shapes and types with these arguments; the first time it is taken to be as large
/// as the largest operand. Not at all is it known of `bool_argwhere`, whose result depends on data and is not counted. So a limit may be exceeded by the
/// difference, once for each operation, shape, type and argument, of which some thousands are remembered.
///
/// # What does not fit
///
/// A step can keep a limit if it holds at any time what cannot be evicted: gradients, random numbers, what scopes and policies
/// keep; and the operands and the result of the operation under way, with what the replay that it belongs to holds. If not, the
/// log says at the first operation that does not fit how many bytes of each kind are needed, the largest need of each step again at its
/// end if it is clearly larger, and the step goes on above the limit. With [`Self::strict`] it is refused. Of a fraction
/// that is as soon as it is measured.
///
/// # With scopes
///
/// A scope decides about what was made in it, at its end; what it evicts is then out of the budget's way. The budget evicts what is
/// there: inside of open scopes, and results of scopes, which have their recipes as long as the budget may evict them. It evicts
/// nothing that a scope keeps: by its policy, or because it is tiny (see [`checkpoint`](crate::checkpoint)).
///
/// # Threads
///
/// A budget belongs to the thread that installs it, so ranks that are threads sharing a device each have their own: install it on each, or
/// on all by [`Self::install_for_process`]. The log warns once of a thread that runs a backward pass without a budget while another one
/// has one. Tensors keep their budget wherever they are used.
///
/// # Steps
///
/// A budget drops the recipes of what it finds to be a step's result, and of what it finds to have been made in an earlier step. It takes
/// a tensor `[1]` of ones for the begin of a backward pass. For the begin of a forward pass it takes what comes next of: a linear
/// layer, a convolution or attention on anything but gradients; a module or activation function on new parameters; an upload of a
/// batch; a scope. Where a forward pass has none of these, [`InstalledBudget::step`](crate::InstalledBudget::step) has to be called after each backward pass, or,
/// if an optimizer step follows, after that: what steps hand on, such as running statistics, would else be recipes through all of them.
///
/// A forward pass that makes a tensor `[1]` of ones itself is taken for a backward pass from there on: what is computed from that tensor is
/// then not recorded, until the next scope or upload, so less is evicted. Values are right whatever is taken for what. A step that
/// spends more on replays and searches than it computes is counted in
/// [`RematStats::thrashing_steps`](crate::RematStats::thrashing_steps) when it is over, or when the budget ends; the log says so as soon
/// as it is certain. At 32 times what it computes, and 0.1 s, the limit is raised to twice itself, or twice what is needed then if that
/// is more, so that the step ends; not if the budget is [strict](Self::strict). It stays raised, and [`InstalledBudget::limit_bytes`](crate::InstalledBudget::limit_bytes) tells.
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
    pub(crate) limit: LimitSetting,
    pub(crate) overflow: Overflow,
    pub(crate) costs: Costs,
    pub(crate) retries: bool,
}

/// How the limit is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum LimitSetting {
    Bytes(u64),
    Fraction(f64),
}

/// What happens when the limit cannot be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overflow {
    Warn,
    Panic,
}

impl MemoryBudget {
    /// A limit in bytes.
    pub fn bytes(bytes: u64) -> Self {
        Self {
            limit: LimitSetting::Bytes(bytes),
            overflow: Overflow::Warn,
            costs: Costs::Estimated,
            retries: false,
        }
    }

    /// A limit as a fraction of what the first step occupies at most, forward and backward, gradients included. That step runs
    /// unconstrained; the limit is in force from the second on.
    ///
    /// # Errors
    ///
    /// [`RematError::InvalidFraction`] unless it is above 0 and at most 1.
    pub fn fraction(fraction: f64) -> Result<Self, RematError> {
        if fraction > 0.0 && fraction <= 1.0 {
            Ok(Self {
                limit: LimitSetting::Fraction(fraction),
                overflow: Overflow::Warn,
                costs: Costs::Estimated,
                retries: false,
            })
        } else {
            Err(RematError::InvalidFraction { fraction })
        }
    }

    /// Panics with [`RematError::BudgetTooSmall`] where an operation does not fit, each time it is tried, instead of a warning and
    /// going on above the limit; if the limit is a fraction, as soon as it is measured and known to be too small.
    pub fn strict(self) -> Self {
        Self {
            overflow: Overflow::Panic,
            ..self
        }
    }

    /// Where the device has no memory for an operation, and the backend panics at once and says so, evicts an eighth of what is live and runs
    /// the operation again, until there is memory or nothing is left to evict. Then the log has the largest holders, and the panic goes on.
    /// docs/out-of-memory.md says which backends do. What an upload of an offloaded tensor takes is not tried again.
    ///
    /// Ranks that fail at different times evict differently: not for recipes that meet other ranks.
    ///
    /// # Cost
    ///
    /// Operands of operations that have no recipe, those of gradients and of the optimizer, stay until the operation is over: none
    /// is written into.
    pub fn retrying(self) -> Self {
        Self {
            retries: true,
            ..self
        }
    }

    /// Takes the costs of operations and uploads from what a device can do, a roofline, in place of those of one thread of a CPU: on a GPU
    /// a product costs hardly more a byte than a GELU, and an upload far more. The same profile is to be given on all ranks: one of the
    /// constants, or what one rank measured.
    ///
    /// ```
    /// use burn_checkpoint::{DeviceProfile, MemoryBudget};
    ///
    /// let budget = MemoryBudget::bytes(8 << 30).costs_on(DeviceProfile::A100);
    /// # let _ = budget;
    /// ```
    pub fn costs_on(self, device: DeviceProfile) -> Self {
        Self {
            costs: Costs::On(device),
            ..self
        }
    }

    /// Takes the time that an operation took for its cost, in place of an estimate.
    ///
    /// Which tensors are evicted then differs from run to run and from rank to rank: not for recipes that meet other ranks. On lazy
    /// backends such times mean nothing.
    pub fn measured_costs(self) -> Self {
        Self {
            costs: Costs::Measured,
            ..self
        }
    }
}
