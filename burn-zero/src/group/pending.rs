//! Collectives that are under way.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{HostBuffer, Output};
use crate::ZeroError;

/// A submitted collective. Dropping it does not cancel it: other ranks count on this one.
#[derive(Debug)]
#[must_use = "a collective's result or error is lost unless it is waited for"]
pub struct Pending(Arc<Slot>);

/// A submitted collective that gives a buffer.
#[derive(Debug)]
#[must_use = "a collective's result or error is lost unless it is waited for"]
pub struct PendingBuffer(pub(crate) Pending);

/// A submitted collective that gives one rank the byte strings of all.
#[derive(Debug)]
#[must_use = "a collective's result or error is lost unless it is waited for"]
pub struct PendingBytes(pub(crate) Pending);

/// Where a collective's result is left by the rank's worker.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    result: Mutex<Option<Result<Output, ZeroError>>>,
    filled: Condvar,
}

impl Slot {
    pub(crate) fn fill(&self, result: Result<Output, ZeroError>) {
        *self.result.lock() = Some(result);
        self.filled.notify_all();
    }
}

impl Pending {
    pub(crate) fn new(slot: Arc<Slot>) -> Self {
        Self(slot)
    }

    /// A collective that has ended already.
    pub fn ready(result: Result<Output, ZeroError>) -> Self {
        let slot = Slot::default();
        slot.fill(result);
        Self(Arc::new(slot))
    }

    /// Waits for the result. It comes within the group's deadline after each rank's last message.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Group`], if a rank does not take part; the errors of the request itself.
    pub fn wait(self) -> Result<Output, ZeroError> {
        let mut result = self.0.result.lock();
        loop {
            match result.take() {
                Some(result) => return result,
                None => self.0.filled.wait(&mut result),
            }
        }
    }

    /// Waits at most `timeout` and says whether the collective has ended.
    pub fn wait_for(&self, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let mut result = self.0.result.lock();
        while result.is_none() && !self.0.filled.wait_until(&mut result, until).timed_out() {}
        result.is_some()
    }

    /// Whether the collective has ended.
    pub fn is_done(&self) -> bool {
        self.0.result.lock().is_some()
    }
}

impl PendingBuffer {
    /// Waits for the buffer, as [`Pending::wait`].
    ///
    /// # Errors
    ///
    /// Those of [`Pending::wait`].
    pub fn wait(self) -> Result<HostBuffer, ZeroError> {
        self.0.wait().map(Output::into_buffer)
    }

    /// Waits at most `timeout` and says whether the collective has ended.
    pub fn wait_for(&self, timeout: Duration) -> bool {
        self.0.wait_for(timeout)
    }

    /// Whether the collective has ended.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }
}

impl PendingBytes {
    /// Waits as [`Pending::wait`] for the byte strings, which only the root gets.
    ///
    /// # Errors
    ///
    /// Those of [`Pending::wait`].
    pub fn wait(self) -> Result<Option<Vec<Vec<u8>>>, ZeroError> {
        Ok(match self.0.wait()? {
            Output::Bytes(all) => Some(all),
            _ => None,
        })
    }

    /// Waits at most `timeout` and says whether the collective has ended.
    pub fn wait_for(&self, timeout: Duration) -> bool {
        self.0.wait_for(timeout)
    }

    /// Whether the collective has ended.
    pub fn is_done(&self) -> bool {
        self.0.is_done()
    }
}
