//! How the steps of a training fall into epochs.

use std::ops::Range;

/// Epochs of a training: the steps between two validations.
///
/// Their lengths add up to the steps exactly and differ by at most one step.
///
/// ```
/// # use examples::gpt::plan::Plan;
/// let plan = Plan::new(10, 4);
/// assert_eq!(plan.epochs(), 3);
/// assert_eq!((1..=3).map(|epoch| plan.steps_of(epoch)).collect::<Vec<_>>(), [0..3, 3..6, 6..10]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    steps: usize,
    epochs: usize,
}

impl Plan {
    /// Epochs of at most `longest` steps.
    ///
    /// # Panics
    ///
    /// If `steps` or `longest` is zero.
    pub fn new(steps: usize, longest: usize) -> Self {
        assert!(steps > 0 && longest > 0, "a training has steps");
        Self {
            steps,
            epochs: steps.div_ceil(longest),
        }
    }

    /// Number of epochs.
    pub fn epochs(&self) -> usize {
        self.epochs
    }

    /// Number of steps of all epochs.
    pub fn steps(&self) -> usize {
        self.steps
    }

    /// The steps of an epoch; epochs count from 1, as Burn's do, and there are no steps after the last.
    pub fn steps_of(&self, epoch: usize) -> Range<usize> {
        let end = |epoch: usize| epoch.min(self.epochs) * self.steps / self.epochs;
        end(epoch - 1)..end(epoch)
    }

    /// Number of steps of the longest epoch.
    pub fn longest(&self) -> usize {
        self.steps.div_ceil(self.epochs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_partition_the_steps() {
        for steps in 1..60 {
            for longest in 1..70 {
                let plan = Plan::new(steps, longest);
                let mut next = 0;
                for epoch in 1..=plan.epochs() {
                    let range = plan.steps_of(epoch);
                    assert_eq!(range.start, next);
                    assert!((1..=longest.min(plan.longest())).contains(&range.len()));
                    assert!(plan.longest() - range.len() <= 1);
                    next = range.end;
                }
                assert_eq!(next, steps);
                assert!(plan.steps_of(plan.epochs() + 1).is_empty());
            }
        }
    }
}
