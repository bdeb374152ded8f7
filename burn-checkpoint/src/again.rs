//! Where the device has no memory left: what can come back is evicted, and the operation runs again.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::memory::MemoryStats;
use crate::op::OpInfo;

/// So many tries in a row that evicted nothing are the last: the first of them brings operands back, and memory may come from elsewhere.
const TRIES: u32 = 2;

/// Runs an operation; as long as the backend panics for want of memory and something can be evicted, and [`TRIES`] times more, runs `again`.
///
/// # Panics
///
/// As the backend did, if that was not for want of memory, or if nothing is left to evict: the log then has the largest holders.
pub(crate) fn again<R>(
    memory: &MemoryStats,
    op: &OpInfo,
    first: impl FnOnce() -> R,
    mut again: impl FnMut() -> R,
) -> R {
    let mut panic = match catch_unwind(AssertUnwindSafe(first)) {
        Ok(result) => return result,
        Err(panic) => panic,
    };
    let mut in_vain = 0;
    loop {
        let Some(limit) = memory.limit().filter(|_| is_out_of_memory(&*panic)) else {
            resume_unwind(panic);
        };
        if in_vain == TRIES {
            let holders = limit.holders(memory.device());
            log::error!(
                "no memory for `{}`, and nothing to evict: {holders}",
                op.name
            );
            resume_unwind(panic);
        }
        let freed = limit.relieve();
        in_vain = if freed == 0 { in_vain + 1 } else { 0 };
        log::warn!("no memory for `{}`: {freed} bytes were evicted", op.name);
        panic = match catch_unwind(AssertUnwindSafe(&mut again)) {
            Ok(result) => return result,
            Err(panic) => panic,
        };
    }
}

/// Whether a backend panicked because an allocation failed: as LibTorch and the drivers of GPUs say it.
fn is_out_of_memory(panic: &(dyn Any + Send)) -> bool {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    let text = text.unwrap_or_default().to_lowercase();
    ["out of memory", "out_of_memory", "allocate memory"]
        .iter()
        .any(|reason| text.contains(reason))
}
