//! The bytes of gradients.

/// The gradients of a budget that count.
#[derive(Default)]
pub(crate) struct Gradients {
    pub bytes: u64,
    retired: u64,
}

impl Gradients {
    /// Adds a storage. Returns how often gradients were retired before.
    #[inline]
    pub fn add(&mut self, bytes: u64) -> u64 {
        self.bytes += bytes;
        self.retired
    }

    /// Removes a storage that was added after so many retirements. Returns whether it still counts.
    #[inline]
    pub fn remove(&mut self, bytes: u64, retired: u64) -> bool {
        let counts = self.retired == retired;
        if counts {
            self.bytes -= bytes;
        }
        counts
    }

    /// Gradients are state from now on: none of them counts any more. Returns their bytes.
    pub fn retire(&mut self) -> u64 {
        self.retired += 1;
        std::mem::take(&mut self.bytes)
    }
}
