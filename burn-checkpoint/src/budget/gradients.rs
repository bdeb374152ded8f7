//! The bytes of gradients.

use parking_lot::Mutex;

/// The gradients of a budget that count.
#[derive(Default)]
pub(crate) struct Gradients(Mutex<Live>);

#[derive(Default)]
struct Live {
    bytes: u64,
    retired: u64,
}

impl Gradients {
    /// Adds a storage. Returns how often gradients were retired before.
    #[inline]
    pub fn add(&self, bytes: u64) -> u64 {
        let mut live = self.0.lock();
        live.bytes += bytes;
        live.retired
    }

    /// Removes a storage that was added after so many retirements. Returns whether it still counts.
    #[inline]
    pub fn remove(&self, bytes: u64, retired: u64) -> bool {
        let mut live = self.0.lock();
        let counts = live.retired == retired;
        if counts {
            live.bytes -= bytes;
        }
        counts
    }

    pub fn bytes(&self) -> u64 {
        self.0.lock().bytes
    }

    /// Gradients are state from now on: none of them counts any more. Returns their bytes.
    pub fn retire(&self) -> u64 {
        let mut live = self.0.lock();
        live.retired += 1;
        std::mem::take(&mut live.bytes)
    }
}
