//! Comparing what comes back with what was dropped.

use std::cell::Cell;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::marker::PhantomData;

use burn::tensor::read_sync;
use burn_backend::Backend;

use crate::error::RematError;
use crate::kind::Value;
use crate::node::{Head, Origin};

thread_local! {
    static ON: Cell<bool> = const { Cell::new(false) };
}

/// Compares, while its guard lives, every tensor that comes back on this thread with what it was.
///
/// A hash of each storage that is dropped is kept; a replay that gives something else panics with
/// [`RematError::ReplayDiffers`], which names the operation. Reasons are operations outside of Burn's table that draw random
/// numbers or have other side effects, and lazy backends that group kernels differently.
///
/// # Cost
///
/// Every tensor that is evicted, replayed or released is read to the host: for tests.
///
/// ```
/// let _verify = burn_checkpoint::Verify::on();
/// ```
#[derive(Debug)]
#[must_use = "ends when this is dropped"]
pub struct Verify {
    before: bool,
    thread: PhantomData<*const ()>,
}

impl Verify {
    /// Turns the comparison on for this thread.
    pub fn on() -> Self {
        Self {
            before: ON.replace(true),
            thread: PhantomData,
        }
    }
}

impl Drop for Verify {
    fn drop(&mut self) {
        ON.set(self.before);
    }
}

/// The hash of a storage that is about to go and can come back, in verify mode.
#[inline]
pub(crate) fn witness<B: Backend>(origin: Origin, value: &Value<B>) -> Option<u64> {
    (ON.get() && origin == Origin::Recorded)
        .then(|| hash(value))
        .flatten()
}

/// Compares what came back with what went.
pub(crate) fn compare<B: Backend>(head: &Head<B>, witness: Option<u64>, value: &Value<B>) {
    let Some(witness) = witness else { return };
    if !ON.get() || hash(value) == Some(witness) {
        return;
    }
    let error = RematError::ReplayDiffers {
        op: head.op.name,
        shape: head.shape.to_vec(),
        dtype: head.dtype,
        number: head.id,
    };
    log::error!("{error}");
    panic!("{error}");
}

fn hash<B: Backend>(value: &Value<B>) -> Option<u64> {
    let mut hasher = DefaultHasher::new();
    if let Value::Many(parts) = value {
        for part in parts {
            hash(part).hash(&mut hasher);
        }
    } else {
        let (download, _) = value.clone().download()?;
        let data = read_sync(download).ok()?;
        data.bytes.hash(&mut hasher);
    }
    Some(hasher.finish())
}
