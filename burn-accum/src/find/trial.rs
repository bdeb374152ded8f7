//! One try of a step that may fail.

use std::{
    cell::Cell,
    fmt::Display,
    panic::{self, AssertUnwindSafe, catch_unwind},
    sync::Once,
};

/// What a step says of itself: nothing, or whether it failed.
pub trait StepResult {
    /// Why it failed, if it did.
    fn failure(self) -> Option<String>;
}

impl StepResult for () {
    fn failure(self) -> Option<String> {
        None
    }
}

impl<T, E: Display> StepResult for Result<T, E> {
    fn failure(self) -> Option<String> {
        self.err().map(|error| error.to_string())
    }
}

thread_local! {
    static IN_TRIAL: Cell<bool> = const { Cell::new(false) };
}

/// Does `work`, and tells why it failed: with an error or with a panic, whose message is not printed as if the process
/// had crashed. Panics of other threads are.
pub(crate) fn attempt<R: StepResult>(work: impl FnOnce() -> R) -> Result<(), String> {
    quiet_hook();
    let before = IN_TRIAL.replace(true);
    // What the step borrows it cannot change, and what it owns is gone.
    let result = catch_unwind(AssertUnwindSafe(work));
    IN_TRIAL.set(before);
    match result {
        Ok(result) => result.failure().map_or(Ok(()), Err),
        Err(payload) => Err(message(&*payload)),
    }
}

fn message(payload: &(dyn core::any::Any + Send)) -> String {
    let text = payload
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Puts a hook before that of the process which leaves out panics of a trial.
fn quiet_hook() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !IN_TRIAL.get() {
                print(info);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_every_kind_are_told() {
        assert_eq!(attempt(|| ()), Ok(()));
        assert_eq!(attempt(|| Ok::<_, String>(3)), Ok(()));
        assert_eq!(
            attempt(|| Err::<(), _>("no memory")),
            Err("no memory".into())
        );
        assert_eq!(
            attempt::<()>(|| panic!("{} bytes", 3)),
            Err::<(), _>("3 bytes".into())
        );
        assert_eq!(
            attempt::<()>(|| panic!("plain")),
            Err::<(), _>("plain".into())
        );
        let odd = attempt::<()>(|| panic::panic_any(3_u8));
        assert_eq!(odd, Err::<(), _>("a panic without a message".into()));
        assert!(!IN_TRIAL.get());
    }
}
