//! The learning rate of a larger effective batch.

use burn::{lr_scheduler::LrScheduler, optim::LearningRate, tensor::backend::Backend};
use serde::{Deserialize, Serialize};

use crate::AccumError;

/// How the learning rate grows with the effective batch (micro-batch x window x ranks), from a
/// recipe for a base batch.
///
/// ```
/// use burn_accum::LrScaling;
///
/// assert_eq!(LrScaling::Linear.factor(256, 1024), 4.0);
/// assert_eq!(LrScaling::SquareRoot.factor(256, 1024), 2.0);
/// assert_eq!(LrScaling::None.factor(256, 1024), 1.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LrScaling {
    /// Not at all. The default.
    #[default]
    None,
    /// `k x` for a batch `k` times as large: SGD (Goyal et al., arXiv 1706.02677, section 2.1).
    Linear,
    /// `sqrt(k) x`: Adam and its like (Malladi et al., arXiv 2205.10287, section 5; Krizhevsky,
    /// arXiv 1404.5997).
    SquareRoot,
}

impl LrScaling {
    /// What the learning rate of the recipe is multiplied with. Batches are numbers of items;
    /// smaller ones give a factor below 1.
    ///
    /// # Panics
    ///
    /// If `base_batch` is 0.
    pub fn factor(self, base_batch: usize, effective_batch: usize) -> f64 {
        assert_ne!(base_batch, 0, "a base batch of no items");
        let times = effective_batch as f64 / base_batch as f64;
        match self {
            Self::None => 1.0,
            Self::Linear => times,
            Self::SquareRoot => times.sqrt(),
        }
    }

    /// Multiplies the learning rate of `inner` with the [`factor`](Self::factor), which is reached
    /// from 1 in a straight line over `warm_up` steps (Goyal et al., section 2.2). Steps are
    /// updates inside of a [`PerUpdate`](crate::PerUpdate), where it belongs:
    ///
    /// ```
    /// use burn::lr_scheduler::{LrScheduler, constant::ConstantLr};
    /// use burn_accum::{LrScaling, PerUpdate, UpdateCounter};
    ///
    /// let updates = UpdateCounter::default(); // Accumulation::updates(); or update.per_update(scaled)
    /// let scaled = LrScaling::Linear.scale(ConstantLr::from(0.1), 256, 1024, 2)?;
    /// let scheduler = PerUpdate::new(scaled.clone(), &updates);
    ///
    /// # let _ = scheduler;
    /// # let mut scaled = scaled;
    /// assert_eq!([0; 4].map(|_| scaled.step()), [0.1, 0.25, 0.4, 0.4]);
    /// # Ok::<(), burn_accum::AccumError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`AccumError::InvalidValue`] if a batch holds no items.
    pub fn scale<S>(
        self,
        inner: S,
        base_batch: usize,
        effective_batch: usize,
        warm_up: usize,
    ) -> Result<ScaledLr<S>, AccumError> {
        AccumError::unless_positive("base_batch", base_batch)?;
        AccumError::unless_positive("effective_batch", effective_batch)?;
        Ok(ScaledLr {
            inner,
            factor: self.factor(base_batch, effective_batch),
            warm_up,
            step: 0,
        })
    }
}

/// A scheduler whose learning rate is multiplied with a factor, after a warm-up: made by
/// [`LrScaling::scale`].
#[derive(Clone, Debug)]
pub struct ScaledLr<S> {
    inner: S,
    factor: f64,
    warm_up: usize,
    step: usize,
}

impl<S> ScaledLr<S> {
    /// The scheduler of the recipe.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Gives the scheduler back.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S: LrScheduler> LrScheduler for ScaledLr<S> {
    type Record<B: Backend> = (S::Record<B>, usize);

    fn step(&mut self) -> LearningRate {
        let warm = match self.step < self.warm_up {
            true => self.step as f64 / self.warm_up as f64,
            false => 1.0,
        };
        self.step += 1;
        self.inner.step() * (1.0 + (self.factor - 1.0) * warm)
    }

    fn to_record<B: Backend>(&self) -> Self::Record<B> {
        (self.inner.to_record::<B>(), self.step)
    }

    fn load_record<B: Backend>(mut self, (inner, step): Self::Record<B>) -> Self {
        self.inner = self.inner.load_record::<B>(inner);
        self.step = step;
        self
    }
}
