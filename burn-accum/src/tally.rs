//! The arithmetic of windows, in integers. Independent of Burn.

use burn_decorator::simulated::values_are_simulated;

use crate::{AccumError, Normalization};

/// What has been counted since the training began, and in the current window.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Tally {
    /// Windows that became a step of the optimizer.
    pub(crate) updates: u64,
    /// Windows that did not, because all of their micro-batches were dropped or their sum
    /// overflowed.
    pub(crate) skipped_updates: u64,
    pub(crate) skipped_in_a_row: u64,
    /// Micro-batches that arrived, dropped ones included, but not those that were dropped under a
    /// loss scaler.
    pub(crate) micro_batches: u64,
    pub(crate) dropped: u64,
    pub(crate) window: WindowTally,
}

/// What is in the current window.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct WindowTally {
    /// Micro-steps taken, those that were dropped included.
    pub(crate) micro_steps: u64,
    /// Micro-batches in the sum.
    pub(crate) micro_batches: u64,
    /// Items in those micro-batches. f64 holds integers up to 2^53.
    pub(crate) items: f64,
}

/// What the host knows of a micro-step before it knows its outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) micro_batches: u64,
    /// Whether it arrived through a loss scaler.
    pub(crate) scaled: bool,
}

impl Tally {
    /// Counts a micro-step that goes into the sum, or, if it has `culprits`, is dropped with its
    /// weight. One that is dropped under a loss scaler counts for nothing.
    pub(crate) fn count(&mut self, step: &Step, items: f64, culprits: &[String]) {
        let dropped = !culprits.is_empty();
        if dropped && step.scaled {
            return;
        }
        self.micro_batches += step.micro_batches;
        self.window.micro_steps += 1;
        if dropped {
            self.dropped += step.micro_batches;
        } else {
            self.window.micro_batches += step.micro_batches;
            self.window.items += items;
        }
    }

    /// Counts a window that became an update, and opens the next.
    pub(crate) fn applied(&mut self) {
        self.updates += 1;
        self.skipped_in_a_row = 0;
        self.window = WindowTally::default();
    }

    /// Counts a window that ended without an update, and opens the next.
    pub(crate) fn skipped(&mut self) {
        self.skipped_updates += 1;
        self.skipped_in_a_row += 1;
        self.window = WindowTally::default();
    }

    /// The divisor of the current window's sum; 1 in place of a number of items that an estimate
    /// simulates.
    ///
    /// # Errors
    ///
    /// [`AccumError::NoItems`].
    pub(crate) fn divisor(&self, normalization: Normalization) -> Result<f64, AccumError> {
        let window = self.window;
        match normalization {
            Normalization::Mean => Ok(window.micro_batches as f64),
            Normalization::Sum => Ok(1.0),
            Normalization::Tokens if window.items > 0.0 => Ok(window.items),
            Normalization::Tokens if values_are_simulated() => Ok(1.0),
            Normalization::Tokens => Err(AccumError::NoItems {
                updates: self.updates,
                micro_batches: window.micro_batches,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(micro_batches: u64) -> Step {
        Step {
            micro_batches,
            scaled: false,
        }
    }

    #[test]
    fn what_is_dropped_has_no_weight() {
        let (mut tally, bad) = (Tally::default(), ["weight".to_owned()]);
        tally.count(&step(1), 3.0, &[]);
        tally.count(&step(1), 1.0, &bad);
        tally.count(&step(2), 9.0, &[]);
        let scaled = Step {
            scaled: true,
            ..step(1)
        };
        let before = tally;
        tally.count(&scaled, 1.0, &bad);
        assert_eq!(tally, before);
        assert_eq!(tally.window.micro_steps, 3);
        assert_eq!(tally.divisor(Normalization::Mean), Ok(3.0));
        assert_eq!(tally.divisor(Normalization::Tokens), Ok(12.0));
        assert_eq!(tally.divisor(Normalization::Sum), Ok(1.0));
        tally.applied();
        assert_eq!(
            (tally.updates, tally.micro_batches, tally.dropped),
            (1, 4, 1)
        );
        assert_eq!(tally.window, WindowTally::default());
    }

    #[test]
    fn a_window_of_nothing_is_no_update() {
        let (mut tally, bad) = (Tally::default(), ["weight".to_owned()]);
        for in_a_row in 1..=3 {
            tally.count(&step(1), 0.0, &bad);
            tally.skipped();
            assert_eq!((tally.updates, tally.skipped_in_a_row), (0, in_a_row));
        }
        tally.count(&step(1), 0.0, &[]);
        assert_eq!(
            tally.divisor(Normalization::Tokens),
            Err(AccumError::NoItems {
                updates: 0,
                micro_batches: 1
            })
        );
        tally.applied();
        assert_eq!((tally.updates, tally.skipped_updates), (1, 3));
        assert_eq!(tally.skipped_in_a_row, 0);
    }
}
