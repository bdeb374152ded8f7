//! A step that is taken range by range.

use super::{
    AdamWStep, Gradients, HostAdamW, HostAdamWError, ParamsOut,
    kernel::{self, Elements, Factors},
    ranges::Ranges,
};

/// A step of [`HostAdamW`] that is under way: elements are updated in any order, as their gradients arrive, each once.
/// [`finish`](Self::finish) counts the step.
///
/// Given up before the first update it leaves every bit as it was: a skipped step. Given up later it leaves the optimizer
/// torn, which every later call reports.
#[derive(Debug)]
#[must_use = "a step counts only when it is finished"]
pub struct OpenStep<'a> {
    optimizer: &'a mut HostAdamW,
    updated: Ranges,
}

impl<'a> OpenStep<'a> {
    pub(super) fn new(optimizer: &'a mut HostAdamW) -> Self {
        Self {
            optimizer,
            updated: Ranges::default(),
        }
    }

    /// The number of this step, counted from 1.
    pub fn number(&self) -> u64 {
        self.optimizer.steps + 1
    }

    /// Updates the elements from `offset` on, as many as there are gradients, and writes them to `out` if there is one.
    ///
    /// # Errors
    ///
    /// [`HostAdamWError::InvalidValue`], [`LengthMismatch`](HostAdamWError::LengthMismatch) for `out`,
    /// [`OutOfRange`](HostAdamWError::OutOfRange) and [`UpdatedTwice`](HostAdamWError::UpdatedTwice). No element has
    /// changed then.
    pub fn update(
        &mut self,
        offset: usize,
        args: AdamWStep,
        gradients: Gradients<'_>,
        out: Option<ParamsOut<'_>>,
    ) -> Result<(), HostAdamWError> {
        args.validate()?;
        if let Some(out) = &out {
            same_length("the low-precision parameters", gradients.len(), out.len())?;
        }
        let range = offset..offset.saturating_add(gradients.len());
        let (step, len) = (self.number(), self.optimizer.len());
        if range.end > len {
            return Err(HostAdamWError::OutOfRange { range, len });
        }
        self.updated.insert(range.clone()).map_err(|updated| {
            let range = range.clone();
            HostAdamWError::UpdatedTwice {
                step,
                range,
                updated,
            }
        })?;
        let factors = Factors::new(&self.optimizer.config, &args, step);
        let elements = Elements {
            gradients,
            master: &mut self.optimizer.master[range.clone()],
            moment_1: &mut self.optimizer.moment_1[range.clone()],
            moment_2: &mut self.optimizer.moment_2[range],
            out,
        };
        kernel::update(self.optimizer.arch, factors, elements);
        Ok(())
    }

    /// Counts the step and returns its number.
    ///
    /// # Errors
    ///
    /// [`HostAdamWError::Unfinished`] unless every element is updated; the optimizer is torn then.
    pub fn finish(mut self) -> Result<u64, HostAdamWError> {
        let step = self.number();
        if let Some(missing) = self.updated.first_gap(self.optimizer.len()) {
            return Err(HostAdamWError::Unfinished { step, missing });
        }
        self.updated = Ranges::default();
        self.optimizer.steps = step;
        Ok(step)
    }
}

impl Drop for OpenStep<'_> {
    fn drop(&mut self) {
        self.optimizer.torn_after = match self.updated.total() {
            0 => None,
            updated => Some(updated),
        };
    }
}

pub(super) fn same_length(
    what: &'static str,
    expected: usize,
    actual: usize,
) -> Result<(), HostAdamWError> {
    if expected == actual {
        return Ok(());
    }
    Err(HostAdamWError::LengthMismatch {
        what,
        expected,
        actual,
    })
}
