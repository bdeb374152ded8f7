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
    live: Vec<Weak<Shared>>,
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

/// Binds `device` to `scaler`, unless it is bound to another live scaler.
pub(super) fn bind_device<B: Backend>(scaler: &Arc<Shared>, device: &Device<B>) {
    PROCESS.lock().bind_device(scaler, key::<B>(device));
}

/// The scaler of this thread.
pub(super) fn of_thread() -> Option<Arc<Shared>> {
    OF_THREAD.with_borrow(Weak::upgrade)
}

/// The scaler of this thread; else, where the loss `needs` one, that of `device`, or the only one there is.
///
/// A loss that needs none must not use the scaler of another run.
pub(super) fn lookup<B: Backend>(device: &Device<B>, needs: bool) -> Option<Arc<Shared>> {
    of_thread().or_else(|| needs.then(|| PROCESS.lock().lookup(key::<B>(device)))?)
}

impl Process {
    fn register(&mut self, scaler: &Arc<Shared>) {
        self.live.retain(|known| known.strong_count() > 0);
        self.of_device.retain(|_, known| known.strong_count() > 0);
        let scaler = Arc::downgrade(scaler);
        if !self.live.iter().any(|known| known.ptr_eq(&scaler)) {
            self.live.push(scaler);
        }
    }

    fn bind_device(&mut self, scaler: &Arc<Shared>, device: DeviceKey) {
        let holder = self.of_device.entry(device).or_default();
        if holder.strong_count() == 0 {
            *holder = Arc::downgrade(scaler);
        }
    }

    fn lookup(&self, device: DeviceKey) -> Option<Arc<Shared>> {
        if let Some(scaler) = self.of_device.get(&device).and_then(Weak::upgrade) {
            return Some(scaler);
        }
        let mut live: Vec<_> = self.live.iter().filter_map(Weak::upgrade).collect();
        match live.len() {
            0 => warn_unscaled(),
            1 => return live.pop(),
            several => warn_ambiguous(several),
        }
        None
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

fn warn_ambiguous(live: usize) {
    static WARNED: Once = Once::new();
    WARNED.call_once(|| {
        log::warn!(
            "backward on thread {:?}: {live} GradScalers are alive and none is bound to this thread or device, so the \
             loss is not scaled; call GradScaler::bind_thread on this thread",
            std::thread::current().name().unwrap_or("unnamed"),
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
    fn a_device_stays_with_its_scaler_and_the_only_live_one_is_found_without() {
        let mut process = Process::default();
        assert!(process.lookup(device()).is_none());

        let first = GradScaler::default();
        process.register(first.shared());
        assert!(finds(&process, &first));

        let second = GradScaler::default();
        process.register(second.shared());
        assert!(process.lookup(device()).is_none(), "two are ambiguous");

        process.bind_device(first.shared(), device());
        process.bind_device(second.shared(), device());
        assert!(finds(&process, &first));

        let watch = Arc::downgrade(first.shared());
        drop(first);
        assert_eq!(watch.strong_count(), 0, "a registered scaler is kept alive");
        assert!(finds(&process, &second));
        process.bind_device(second.shared(), device());
        assert!(finds(&process, &second));
    }
}
