//! Comparing what comes back with what was dropped.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};

use burn_backend::{Backend, read_sync};

use crate::error::RematError;
use crate::node::kind::Value;
use crate::record::flags::FLAGS;

/// Whether any thread has ever compared. Read first, because a static is read faster than a
/// thread-local.
static EVER: AtomicBool = AtomicBool::new(false);

/// While its guard lives, replays and compares every tensor that is evicted on this thread, and
/// compares what comes back with what it was.
///
/// - What a scope, a budget or [`evict`](crate::evict) is about to evict is replayed at once and
///   compared, whether backward will ask for it or not. Byte limits are not in force meanwhile, and
///   neither counters nor traces show it.
/// - What comes back later, by a replay or from host memory, is compared with the hash of what it
///   was, if it was dropped or moved on this thread in this mode. That includes temporaries, which
///   were dropped because no handle referred to them.
/// - A difference panics with [`RematError::ReplayDiffers`], or [`RematError::HostCopyDiffers`] for
///   a copy in host memory, which name the operation. Reasons are operations outside of Burn's
///   table that draw random numbers or have other side effects, functions that deliver something
///   else, and lazy backends that group kernels differently.
///
/// Threads that train on separate tensors may each have a guard. No other thread may replay tensors
/// that it shares with a thread in this mode: a tensor brought back for a comparison is dropped at
/// once, even if the other thread has just found it.
///
/// A tensor that is [`delivered`](crate::delivered()) may be another one each time and is not
/// compared itself.
///
/// # Cost
///
/// Every tensor that is evicted, replayed, moved or released is read to the host, and every evicted
/// one computed once more, from what is resident: for tests.
///
/// # Panics
///
/// Where a tensor cannot be read to be compared.
///
/// ```
/// let _verify = burn_checkpoint::Verify::on();
/// ```
#[derive(Debug)]
#[must_use = "ends when this is dropped"]
pub struct Verify(PhantomData<*const ()>);

impl Verify {
    /// Turns the comparison on for this thread, until the last of its guards is dropped.
    pub fn on() -> Self {
        EVER.store(true, Ordering::Relaxed);
        FLAGS.with(|flags| flags.verifying.set(flags.verifying.get() + 1));
        Self(PhantomData)
    }
}

impl Drop for Verify {
    fn drop(&mut self) {
        FLAGS.with(|flags| flags.verifying.set(flags.verifying.get() - 1));
    }
}

/// Whether this thread compares.
#[inline]
pub(crate) fn is_on() -> bool {
    EVER.load(Ordering::Relaxed) && has_guard()
}

/// Whether this thread replays only to compare: byte limits and counters ignore it.
#[inline]
pub(crate) fn is_rehearsing() -> bool {
    EVER.load(Ordering::Relaxed) && rehearses()
}

// Not inlined, so that the code of each operation is shorter.

#[cold]
#[inline(never)]
fn has_guard() -> bool {
    FLAGS.with(|flags| flags.verifying.get() > 0)
}

#[cold]
#[inline(never)]
fn rehearses() -> bool {
    FLAGS.with(|flags| flags.rehearses.get())
}

/// The checksum of a storage that is dropped or moved, in verify mode.
#[inline]
pub(crate) fn checksum<B: Backend>(value: &Value<B>) -> Option<u64> {
    is_on().then(|| hash(value))
}

/// Whether this thread compares, and a value that came back differs from the checksum of what was
/// dropped.
pub(crate) fn differs<B: Backend>(checksum: Option<u64>, value: &Value<B>) -> bool {
    checksum.is_some_and(|checksum| is_on() && hash(value) != checksum)
}

/// Panics with a difference. The caller drops the differing value first: see `drops.rs`.
pub(crate) fn fail(error: &RematError) -> ! {
    log::error!("{error}");
    panic!("{error}");
}

fn hash<B: Backend>(value: &Value<B>) -> u64 {
    let mut hasher = DefaultHasher::new();
    if let Value::Many(parts) = value {
        for part in parts {
            hash(part).hash(&mut hasher);
        }
    } else if let Some(download) = value.clone().download() {
        let data = read_sync(download).unwrap_or_else(|error| {
            panic!("a tensor cannot be compared, for it cannot be read: {error}")
        });
        data.as_bytes().hash(&mut hasher);
    }
    hasher.finish()
}
