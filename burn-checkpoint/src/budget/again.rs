//! Out of device memory: evicts tensors that can come back, and runs the operation again.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::budget::memory::MemoryStats;
use crate::record::op::OpInfo;

/// Retries in a row that evict nothing before the panic is resumed: the first brings operands back,
/// and memory may be freed elsewhere.
const TRIES: u32 = 2;

/// Calls `run`. While it panics for want of memory and the budget retries, evicts tensors and calls
/// it again. Panics as the backend does if memory was not the reason, or if [`TRIES`] retries in a
/// row evicted nothing: the largest holders are then logged.
pub(crate) fn again<R>(memory: &MemoryStats, op: &OpInfo, mut run: impl FnMut() -> R) -> R {
    if !memory.retries() {
        return run();
    }
    let mut in_vain = 0;
    loop {
        let panic = match catch_unwind(AssertUnwindSafe(&mut run)) {
            Ok(result) => return result,
            Err(panic) => panic,
        };
        let Some(budget) = memory.budget().filter(|_| is_out_of_memory(&*panic)) else {
            resume_unwind(panic);
        };
        if in_vain == TRIES {
            let (op, holders) = (op.name, budget.holders(memory.device));
            log::error!("no memory for `{op}`, and nothing to evict: {holders}");
            resume_unwind(panic);
        }
        let freed = budget.relieve();
        in_vain = if freed == 0 { in_vain + 1 } else { 0 };
        log::warn!("no memory for `{}`: {freed} bytes were evicted", op.name);
    }
}

/// Whether a backend panicked because an allocation failed, by the messages of LibTorch and of GPU
/// drivers.
fn is_out_of_memory(panic: &(dyn Any + Send)) -> bool {
    let formatted = panic.downcast_ref::<String>().map(String::as_str);
    let message = formatted.or_else(|| panic.downcast_ref::<&str>().copied());
    let text = message.unwrap_or_default().to_lowercase();
    let reasons = ["out of memory", "out_of_memory", "allocate memory"];
    reasons.iter().any(|reason| text.contains(reason))
}
