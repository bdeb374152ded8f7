//! Finds the scaler of a thread, of a device, or of the process. It holds weak references only.

use std::{
    any::TypeId,
    cell::RefCell,
    collections::HashMap,
    sync::{Arc, LazyLock, Once, Weak},
};

use burn::{
    prelude::DeviceOps,
    tensor::{Device, backend::Backend, backend::DeviceId},
};
use parking_lot::Mutex;

use super::state::Shared;

thread_local! {
    static OF_THREAD: RefCell<Weak<Shared>> = const { RefCell::new(Weak::new()) };
}

static PROCESS: LazyLock<Mutex<Process>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Process {
    /// The oldest first.
    live: Vec<Weak<Shared>>,
    /// The scaler that stepped last on a device, since the newest one was made.
    of_device: HashMap<DeviceKey, Weak<Shared>>,
}

/// Devices of different backends may have the same [`DeviceId`].
type DeviceKey = (TypeId, DeviceId);

fn key<B: Backend>(device: &Device<B>) -> DeviceKey {
    (TypeId::of::<Device<B>>(), device.to_id())
}

/// Adds a new scaler.
pub(super) fn register(scaler: &Arc<Shared>) {
    PROCESS.lock().register(scaler);
}

/// Binds the current thread to `scaler`.
pub(super) fn bind_thread(scaler: &Arc<Shared>) {
    OF_THREAD.set(Arc::downgrade(scaler));
}

/// Binds `device` to `scaler`.
pub(super) fn bind_device<B: Backend>(scaler: &Arc<Shared>, device: &Device<B>) {
    PROCESS.lock().bind_device(scaler, key::<B>(device));
}

/// The scaler of this thread.
pub(super) fn of_thread() -> Option<Arc<Shared>> {
    OF_THREAD.with_borrow(Weak::upgrade)
}

/// The scaler of this thread; else, where the loss `needs` one, that of `device`, or the newest.
///
/// A loss that needs none must not use the scaler of another run.
pub(super) fn lookup<B: Backend>(device: &Device<B>, needs: bool) -> Option<Arc<Shared>> {
    of_thread().or_else(|| needs.then(|| PROCESS.lock().lookup(key::<B>(device)))?)
}

impl Process {
    fn register(&mut self, scaler: &Arc<Shared>) {
        self.live.retain(|known| known.strong_count() > 0);
        // A training that begins must not find the scaler of an earlier one, which may still be alive.
        self.of_device.clear();
        let scaler = Arc::downgrade(scaler);
        if !self.live.iter().any(|known| known.ptr_eq(&scaler)) {
            self.live.push(scaler);
        }
    }

    fn bind_device(&mut self, scaler: &Arc<Shared>, device: DeviceKey) {
        self.of_device.insert(device, Arc::downgrade(scaler));
    }

    fn lookup(&self, device: DeviceKey) -> Option<Arc<Shared>> {
        let of_device = self.of_device.get(&device).into_iter();
        let mut scalers = of_device.chain(self.live.iter().rev());
        let found = scalers.find_map(Weak::upgrade);
        if found.is_none() {
            warn_unscaled();
        }
        found
    }
}

/// Warns once that f16 gradients may underflow.
fn warn_unscaled() {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        log::warn!(
            "backward in f16 without a loss scale: gradients below 6e-8 become 0; make a GradScaler and wrap the \
             optimizer, `GradScaler::new(GradScalerConfig::default())?.wrap(optimizer)`, or say with \
             `GradScaler::disabled()` that none is wanted"
        );
    });
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;
    use crate::GradScaler;

    fn device() -> DeviceKey {
        key::<Flex>(&Default::default())
    }

    fn finds(process: &Process, scaler: &GradScaler) -> bool {
        let found = process.lookup(device());
        found.is_some_and(|found| Arc::ptr_eq(&found, scaler.shared()))
    }

    #[test]
    fn the_scaler_of_a_device_is_the_last_that_stepped_on_it_else_the_newest() {
        let mut process = Process::default();
        assert!(process.lookup(device()).is_none());

        let first = GradScaler::default();
        process.register(first.shared());
        assert!(finds(&process, &first));
        process.bind_device(first.shared(), device());

        // Another training begins; the scaler of the first is still alive.
        let second = GradScaler::default();
        process.register(second.shared());
        assert!(finds(&process, &second));
        process.bind_device(second.shared(), device());
        process.bind_device(first.shared(), device());
        assert!(finds(&process, &first));

        let watch = Arc::downgrade(first.shared());
        drop(first);
        assert_eq!(watch.strong_count(), 0, "a registered scaler is kept alive");
        assert!(finds(&process, &second));
    }
}
