//! What this thread is doing, as far as operations read it.
//!
//! One thread-local value of cells without destructors, because reading a cell is faster than
//! borrowing: what has a destructor is in `context.rs`. It imports nothing that uses it.

use std::cell::Cell;

use crate::record::step::{DeviceRead, Phase, Read, Step, Told};

thread_local! {
    pub(crate) static FLAGS: Flags = const {
        Flags {
            known: Cell::new(0),
            in_scope: Cell::new(false),
            has_budget: Cell::new(false),
            operations: Cell::new(0),
            step: Cell::new(Step::FIRST),
            told: Cell::new(Told::NOTHING),
            seeded: Cell::new(None),
            device_read: Cell::new(DeviceRead::NONE),
            met: Cell::new(false),
            collects: Cell::new(false),
            replays: Cell::new(false),
        }
    };
}

/// What this thread is doing.
pub(crate) struct Flags {
    /// The number of changes of budgets, of any thread, that this one has followed.
    pub known: Cell<u64>,
    pub in_scope: Cell<bool>,
    pub has_budget: Cell<bool>,
    /// The number of operations so far.
    operations: Cell<u64>,
    pub step: Cell<Step>,
    pub told: Cell<Told>,
    /// The number of the last backward pass whose seed was made, of those that are told.
    pub seeded: Cell<Option<u64>>,
    device_read: Cell<DeviceRead>,
    /// Whether a tensor of `Remat` was used or returned since the outermost scope began.
    pub met: Cell<bool>,
    /// Whether the results of a scope are being collected.
    pub collects: Cell<bool>,
    /// Whether evicted tensors are being brought back.
    pub replays: Cell<bool>,
}

impl Flags {
    /// Begins a pass. Returns where in a step the thread was.
    pub fn begin(&self, phase: Phase) -> Step {
        self.step.replace(self.step.get().begin(phase))
    }

    /// Counts an operation, and returns its number.
    #[inline]
    pub fn tick(&self) -> u64 {
        self.operations.set(self.operations.get() + 1);
        self.operations.get()
    }

    /// Notes that the device of a float tensor is read. Returns whether this begins an update: of
    /// the programs that run after a gradient was made, only an optimizer reads the device of a
    /// parameter right after that of a gradient.
    pub fn reads_device(&self, of: Read) -> bool {
        let after_operation = self.operations.get();
        let last = self.device_read.replace(DeviceRead {
            of,
            after_operation,
        });
        last.of == Read::Gradient && of != Read::Gradient && last.after_operation == after_operation
    }

    /// Whether the float tensor whose device was read last is one that backward works on. Then a
    /// new tensor is no seed of another backward pass: autodiff reads the device of the loss before
    /// it makes the seed, that of a gradient before the ones of a mean or sum.
    pub fn is_at_gradient(&self) -> bool {
        self.device_read.get().of != Read::Other
    }
}

/// Counts an operation of this thread, and returns its number.
#[inline]
pub(crate) fn tick() -> u64 {
    FLAGS.with(Flags::tick)
}

/// The number of this thread's last operation.
#[inline]
pub(crate) fn now() -> u64 {
    FLAGS.with(|flags| flags.operations.get())
}

/// A flag that is set until this is dropped, also by a panic.
pub(crate) struct Raised {
    flag: fn(&Flags) -> &Cell<bool>,
    before: bool,
}

impl Raised {
    pub fn new(flag: fn(&Flags) -> &Cell<bool>) -> Self {
        let before = FLAGS.with(|flags| flag(flags).replace(true));
        Self { flag, before }
    }
}

impl Drop for Raised {
    fn drop(&mut self) {
        FLAGS.with(|flags| (self.flag)(flags).set(self.before));
    }
}
