//! Threads that run a model of the user's.

use std::env;
use std::thread::Builder;

/// Bytes of the stack of a thread that runs a model, 64 MiB. The system commits only those that are
/// touched.
///
/// Burn, for one, passes modules by value, and a model of many small parameters is large by value,
/// because a `Param` has hundreds of bytes: in a build without optimisation one of 57 KiB overflows
/// the 2 MiB that Rust gives a thread.
pub const MODEL_STACK_BYTES: usize = 64 << 20;

/// A thread of this name with a stack for a model: of [`MODEL_STACK_BYTES`], or of `RUST_MIN_STACK`
/// bytes where that environment variable, which sets the stack of Rust's other threads, asks for
/// more.
///
/// ```
/// use burn_ranks::thread::model_thread;
///
/// let thread = model_thread("trial").spawn(|| [0_u8; 8 << 20].len())?;
/// assert_eq!(thread.join().ok(), Some(8 << 20));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn model_thread(name: impl Into<String>) -> Builder {
    let variable = env::var("RUST_MIN_STACK").ok();
    let asked_bytes = variable.and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
    Builder::new()
        .name(name.into())
        .stack_size(MODEL_STACK_BYTES.max(asked_bytes))
}
