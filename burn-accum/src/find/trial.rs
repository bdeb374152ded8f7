//! One try of a step that may fail.

use std::{
    fmt::Display,
    panic::{self, AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use parking_lot::Mutex;

/// The result of a step: nothing, or whether it failed.
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

/// Only one thread runs a trial at a time: trials would measure each other, and there is one panic
/// hook.
static TURN: Mutex<()> = Mutex::new(());

/// Runs `work` and returns why it failed, if it did: its error, or the message of its panic, which
/// is not printed.
///
/// A panic of any other thread meanwhile is a failure too: CubeCL allocates on the device's thread,
/// which survives the panic of a failed allocation and does not report it to the waiting thread.
pub(crate) fn attempt<R: StepResult>(work: impl FnOnce() -> R) -> Result<(), String> {
    let _turn = TURN.lock();
    let first_panic = Arc::new(Mutex::new(None));
    let print = panic::take_hook();
    panic::set_hook({
        let first_panic = first_panic.clone();
        Box::new(move |panic| {
            let text = panic
                .payload_as_str()
                .unwrap_or("a panic without a message");
            first_panic.lock().get_or_insert_with(|| text.to_owned());
        })
    });
    // Unwind safe: the step cannot change what it borrows, and what it owns is dropped.
    let result = catch_unwind(AssertUnwindSafe(work));
    panic::set_hook(print);

    let panicked = first_panic.lock().take();
    match (panicked, result) {
        (Some(reason), _) => Err(reason),
        (None, Ok(result)) => result.failure().map_or(Ok(()), Err),
        // Unwound without a panic: `resume_unwind`.
        (None, Err(_)) => Err("the panic of another thread".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_every_kind_are_told() {
        let _turn = crate::find::tests::panics();
        assert_eq!(attempt(|| ()), Ok(()));
        assert_eq!(attempt(|| Ok::<_, String>(3)), Ok(()));
        let fails = |text: &str| Err::<(), _>(text.to_owned());
        assert_eq!(attempt(|| Err::<(), _>("no memory")), fails("no memory"));
        assert_eq!(attempt::<()>(|| panic!("{} bytes", 3)), fails("3 bytes"));
        assert_eq!(attempt::<()>(|| panic!("plain")), fails("plain"));
        let odd = attempt::<()>(|| panic::panic_any(3_u8));
        assert_eq!(odd, fails("a panic without a message"));
        let passed_on = attempt::<()>(|| panic::resume_unwind(Box::new(3_u8)));
        assert_eq!(passed_on, fails("the panic of another thread"));
        assert_eq!(attempt(|| ()), Ok(()), "the next one starts afresh");
    }

    #[test]
    fn another_thread_may_be_the_one_that_fails() {
        let _turn = crate::find::tests::panics();
        let survives = || {
            let device = std::thread::spawn(|| panic!("no page of 3 bytes"));
            assert!(device.join().is_err());
        };
        assert_eq!(attempt(survives), Err("no page of 3 bytes".to_owned()));
    }
}
