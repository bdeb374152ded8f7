//! Accumulation and clipping as parts of a [`burn_update::Update`].

use burn::module::{AutodiffModule, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Device, TensorPrimitive, read_sync};
use burn_decorator::gauge::Gauge;
use burn_decorator::gradient;
use burn_decorator::types::FloatTensorOps;
use burn_update::{
    Accumulate, Arrived, IntoAccumulate, Loss, Part, PartState, Stateful, Step, Update, UpdateError,
};

use crate::accumulation::{Deciding, PartialWindow};
use crate::tally::{self, Tally, WindowTally};
use crate::{AccumConfig, AccumError, Accumulation, ClipNorm, Counted, GradNormMetric};

/// The name of an accumulation in records and errors.
const ACCUMULATE: &str = "accumulate";

/// The name of the clipping.
const CLIP: &str = "clip";

/// `clip_norm(1.0)`: clipping by the global norm as a part of an update.
pub trait ClipByNorm: Sized {
    /// Clips the gradients by their norm over all parameters, as the last part before the
    /// optimizer; to read the norm, `let clip = ClipNorm::new(1.0)?;`, `clip.norm()` and
    /// `update.clip(clip)?`.
    ///
    /// # Errors
    ///
    /// [`AccumError::InvalidValue`] unless `max_norm` is above 0.
    fn clip_norm(self, max_norm: f32) -> Result<Self, UpdateError>;
}

impl<M: AutodiffModule<B> + 'static, B: AutodiffBackend> ClipByNorm for Update<M, B> {
    fn clip_norm(self, max_norm: f32) -> Result<Self, UpdateError> {
        let clip = ClipNorm::new(max_norm).map_err(|error| UpdateError::of_part(CLIP, error))?;
        self.clip(clip)
    }
}

impl<B: AutodiffBackend> Stateful<B> for ClipNorm {
    fn name(&self) -> String {
        CLIP.to_owned()
    }

    fn gauges(&self) -> Vec<Gauge> {
        vec![GradNormMetric::new(&self.norm()).into_gauge()]
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> Part<M, B> for ClipNorm {
    fn gradients(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: &M,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, UpdateError> {
        let of_all_ranks = step.norm.take();
        let (clipped, norm) = self.clip::<B, M>(model, gradients, of_all_ranks);
        step.norm = norm;
        Ok(clipped)
    }
}

impl From<AccumError> for UpdateError {
    fn from(error: AccumError) -> Self {
        Self::of_part(ACCUMULATE, error)
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> IntoAccumulate<M, B> for AccumConfig {
    type Part = Accumulation;

    fn into_accumulate(self) -> Result<Accumulation, UpdateError> {
        Ok(Accumulation::new(self)?)
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> IntoAccumulate<M, B> for Accumulation {
    type Part = Self;

    fn into_accumulate(self) -> Result<Self, UpdateError> {
        Ok(self)
    }
}

/// Where the sums of the window stand in the state, by parameter id.
const SUM: &str = "sum ";

impl<B: AutodiffBackend> Stateful<B> for Accumulation {
    fn name(&self) -> String {
        ACCUMULATE.to_owned()
    }

    fn save(&self) -> Option<PartState> {
        let PartialWindow { tally, sums } = self.partial::<B::InnerBackend>();
        let mut state = PartState::default();
        for (name, value) in integers(tally) {
            state.put_integer(name, value);
        }
        state.put_number("window items", tally.window.items);
        for (id, sum) in sums {
            // A sum of one rank's gradients, which a record keeps as it is.
            let read =
                gradient::update(|| read_sync(B::InnerBackend::float_into_data(sum.tensor())));
            let data = read.expect("the sums can be read from their device");
            state.put_tensor(format!("{SUM}{}", id.serialize()), data);
        }
        Some(state)
    }

    fn load(&mut self, mut state: PartState, device: &Device<B>) -> Result<(), UpdateError> {
        let mut integer = |name| state.take_integer(name);
        let mut tally = Tally {
            updates: integer("updates")?,
            skipped_updates: integer("skipped updates")?,
            skipped_in_a_row: integer("skipped in a row")?,
            micro_batches: integer("micro-batches")?,
            dropped: integer("dropped")?,
            window: WindowTally {
                micro_steps: integer("window micro-steps")?,
                micro_batches: integer("window micro-batches")?,
                items: 0.0,
            },
        };
        tally.window.items = state.take_number("window items")?;
        let sums = state.take_tensors(SUM).into_iter().map(|(id, data)| {
            let sum = gradient::load(|| B::InnerBackend::float_from_data(data, device));
            (ParamId::deserialize(&id), TensorPrimitive::Float(sum))
        });
        let sums = sums.collect();
        self.restore::<B::InnerBackend>(PartialWindow { tally, sums });
        Ok(())
    }
}

/// The whole numbers of a tally by the names that they have in a state.
fn integers(tally: Tally) -> [(&'static str, u64); 7] {
    [
        ("updates", tally.updates),
        ("skipped updates", tally.skipped_updates),
        ("skipped in a row", tally.skipped_in_a_row),
        ("micro-batches", tally.micro_batches),
        ("dropped", tally.dropped),
        ("window micro-steps", tally.window.micro_steps),
        ("window micro-batches", tally.window.micro_batches),
    ]
}

/// Runs `decide` with what the ranks of the step decide, if there are several.
fn decided<I: Backend, R>(step: &Step<I>, decide: impl FnOnce(&Deciding<'_>) -> R) -> R {
    decide(&Deciding {
        on_host: step.decides_on_host,
        union: &|names| step.non_finite_on_any_rank(names),
        items: &|own| match &step.ranks {
            Some(ranks) => ranks.items(own),
            None => Ok(own),
        },
    })
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> Accumulate<M, B> for Accumulation {
    fn add(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: &M,
        gradients: Arrived,
    ) -> Result<(), UpdateError> {
        let micro_step = tally::Step {
            micro_batches: step.micro_batches,
            scaled: step.is_scaled,
        };
        let items = core::mem::take(&mut step.items);
        let verdict = decided(step, |deciding| {
            self.add::<B, M>(model, gradients, micro_step, items, deciding)
        })?;
        step.verdict = Some(verdict);
        Ok(())
    }

    fn close(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        model: &M,
    ) -> Result<Option<GradientsParams>, UpdateError> {
        decided(step, |deciding| {
            self.close::<B, M>(model, step.is_flush, deciding)
        })
    }

    fn end(&mut self, step: &Step<B::InnerBackend>) -> Result<(), UpdateError> {
        if self.is_closed() {
            if step.updates() {
                self.applied();
            } else {
                self.skip(match step.overflowed[..] {
                    [] => "the optimizer made no update of it",
                    _ => "it overflowed in the reduction over ranks",
                })?;
            }
        }
        self.publish::<B::InnerBackend>();
        Ok(())
    }
}

impl<B: AutodiffBackend> Loss<B> for Counted<B> {
    fn backward<M: AutodiffModule<B>>(self, model: &M) -> GradientsParams {
        Counted::backward(self, model)
    }
}
