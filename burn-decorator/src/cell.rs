//! Values in the cells of a thread while something runs on it, for what Burn's traits have no
//! argument for.

use core::cell::{Cell, RefCell};
use std::thread::LocalKey;

/// Sets a thread's cell until it is dropped, also by a panic.
pub struct Scope<T: Copy + 'static>(&'static LocalKey<Cell<T>>, T);

impl<T: Copy> Scope<T> {
    /// Sets `key` to `value`.
    pub fn enter(key: &'static LocalKey<Cell<T>>, value: T) -> Self {
        Self(key, key.replace(value))
    }
}

impl<T: Copy> Drop for Scope<T> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// Reads a thread's cell on a path that seldom runs. The compiler keeps such a path out of the code
/// that usually runs, which stays short.
#[cold]
#[inline(never)]
pub fn rare<T: Copy>(key: &'static LocalKey<Cell<T>>) -> T {
    key.get()
}

/// Runs `run` with `value` in a thread's cell, and returns what is there at the end. What was there
/// before comes back, also after a panic.
pub fn with_value<T: 'static, R>(
    key: &'static LocalKey<RefCell<Option<T>>>,
    value: T,
    run: impl FnOnce() -> R,
) -> (R, Option<T>) {
    struct Restore<T: 'static>(&'static LocalKey<RefCell<Option<T>>>, Option<T>);
    impl<T> Drop for Restore<T> {
        fn drop(&mut self) {
            self.0.set(self.1.take());
        }
    }
    let _restore = Restore(key, key.replace(Some(value)));
    let result = run();
    (result, key.take())
}
