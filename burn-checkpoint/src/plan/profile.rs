//! What a chain of blocks costs: the planner's input.

/// Bytes and times of a chain of blocks `x[0] -> x[1] -> .. -> x[n]`, and of what follows it up to
/// the loss.
///
/// `profile_chain` measures one; it may be written by hand as well. Times are nanoseconds, but only
/// their ratios matter: FLOPs do as well. The sums of all bytes, and of all times with replays,
/// have to fit 64 bits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// Bytes that are resident all the time: the chain's input `x[0]`, and whatever else the limit
    /// of a plan is to cover (parameters, optimizer state).
    pub base_bytes: u64,
    /// The blocks, in the order of the forward pass.
    pub blocks: Vec<BlockProfile>,
    /// What follows the chain in the same step.
    pub tail: TailProfile,
}

/// Bytes and times of one block `x[i] -> x[i + 1]`.
///
/// Bytes are counted above those that are live just before the block's forward pass, which include
/// its input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockProfile {
    /// The output `x[i + 1]`, and the gradient of it.
    pub output_bytes: u64,
    /// All that the forward pass leaves on the tape, the output included.
    pub tape_bytes: u64,
    /// The part of the tape that stays even when a scope ends, because it cannot be computed again:
    /// random numbers.
    pub kept_bytes: u64,
    /// The most at any time of the forward pass; `tape_bytes` if that is more.
    pub forward_peak_bytes: u64,
    /// The most at any time of the backward pass: the tape, gradients of activations and of
    /// parameters, temporaries.
    pub backward_peak_bytes: u64,
    /// Gradients of parameters that the backward pass leaves behind until the optimizer takes them.
    pub gradient_bytes: u64,
    /// Time of the forward pass.
    pub forward_ns: u64,
    /// Time to bring back what the backward pass reads. Shorter than `forward_ns` where the block
    /// ends with operations whose results backward does not read, such as a projection and a
    /// residual sum.
    pub replay_ns: u64,
    /// Time of the backward pass.
    pub backward_ns: u64,
}

/// What follows the chain: head and loss.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TailProfile {
    /// The most bytes above those at the chain's end, forward and backward, the gradient of the
    /// chain's output included.
    pub peak_bytes: u64,
    /// Gradients of parameters that its backward pass leaves behind.
    pub gradient_bytes: u64,
}
