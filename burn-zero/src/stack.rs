//! A stack for models that are large by value, on a thread that the user started.

use burn_ranks::thread::MODEL_STACK_BYTES;

/// Bytes that are enough for a step with a model of a hundred KiB, in a build without optimisation.
/// A main thread usually has more left, so that its steps allocate no stack.
const STEP_BYTES: usize = 4 << 20;

/// Runs `work` on this thread, with a new stack if too little is left of the thread's own. State of
/// the thread stays, such as the policy and the rank context.
pub(crate) fn with_stack<R>(work: impl FnOnce() -> R) -> R {
    stacker::maybe_grow(STEP_BYTES, MODEL_STACK_BYTES, work)
}
