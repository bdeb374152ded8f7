//! A recording of every tensor of a thread.

use crate::budget::install::{InstalledBudget, record_operations};
use crate::observe::trace::{self, Event, Recording};

/// Collects what happens to every tensor of this thread from now on: [`trace::record`] alone sees
/// the tensors of scopes, and all tensors only while a [`MemoryBudget`] is in force. Where none is,
/// [`MemoryBudget::unlimited`] is in force, on every thread, until the recording ends; nothing is
/// evicted by it.
///
/// # Cost
///
/// Those of [`trace::record`] and of [`MemoryBudget::install`].
///
/// [`MemoryBudget`]: crate::MemoryBudget
/// [`MemoryBudget::unlimited`]: crate::MemoryBudget::unlimited
/// [`MemoryBudget::install`]: crate::MemoryBudget::install
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::Tensor;
/// use burn_checkpoint::snapshot::Snapshot;
/// use burn_checkpoint::{Remat, record_all};
/// use burn_flex::Flex;
///
/// let recording = record_all();
/// let x = Tensor::<Autodiff<Remat<Flex>>, 1>::ones([1024], &Default::default()).require_grad();
/// x.exp().log().sum().backward();
/// println!("{}", Snapshot::at_peak(&recording.finish()).expect("there were tensors"));
/// ```
pub fn record_all() -> FullRecording {
    FullRecording {
        _unlimited: record_operations(),
        recording: trace::record(),
    }
}

/// A recording of every tensor of its thread, by [`record_all`]; ends when dropped.
#[derive(Debug)]
#[must_use = "the recording ends when this is dropped"]
pub struct FullRecording {
    recording: Recording,
    _unlimited: Option<InstalledBudget>,
}

impl FullRecording {
    /// Takes out the events so far.
    pub fn take(&self) -> Vec<Event> {
        self.recording.take()
    }

    /// Ends the recording and returns its events.
    pub fn finish(self) -> Vec<Event> {
        self.take()
    }
}
