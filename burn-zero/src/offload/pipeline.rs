//! Parameters on their way through the host: while one is updated, the next is downloaded and the last uploaded.
//!
//! ```text
//! this thread    download 1, 2 | upload 0, download 3 | upload 1, download 4 | ..
//! worker               update 0 | update 1             | update 2             | ..
//! ```

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;

use burn::module::ParamId;
use burn::tensor::{DType, Element, TensorData};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;
use half::{bf16, f16};
use rayon::prelude::*;

use super::host_adamw::copy;
use super::record::StateItem;
use super::{
    AdamWState, AdamWStep, Gradients, HostAdamW, HostAdamWConfig, OffloadError, ParamsOut,
};
use crate::host::{HostRead, floats, is_finite};

/// A parameter whose state is on the host.
#[derive(Debug)]
pub(super) struct HostState {
    pub(super) adamw: HostAdamW,
    pub(super) shape: Vec<usize>,
    /// Of the parameter; the master is f32.
    pub(super) dtype: DType,
}

/// What an update starts from.
pub(super) enum Start {
    /// State of earlier steps.
    Known(Arc<HostState>),
    /// State of a record. The update comes with a value.
    Saved(Arc<StateItem>),
    /// Nothing. The update comes with a value.
    New,
}

/// The update of a parameter: with tensors of the device, or with those on their way to the host.
pub(super) struct Update<T> {
    pub(super) id: ParamId,
    pub(super) path: String,
    pub(super) start: Start,
    /// The parameter, where the host does not know it.
    pub(super) value: Option<T>,
    pub(super) gradient: T,
}

/// An updated parameter.
pub(super) struct Updated {
    pub(super) state: Arc<HostState>,
    pub(super) value: TensorData,
}

type Outcome = Result<(ParamId, Updated), OffloadError>;

/// Hands updates to a worker, so many at a time.
pub(super) struct Pipeline<I: Backend> {
    waiting: VecDeque<Update<FloatTensor<I>>>,
    staging: usize,
    underway: usize,
    jobs: Sender<Update<HostRead>>,
    outcomes: Receiver<Outcome>,
    /// Parameters that were not asked for yet.
    done: HashMap<ParamId, Updated>,
}

impl<I: Backend> Pipeline<I> {
    /// The worker ends with the pipeline.
    pub(super) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        updates: Vec<Update<FloatTensor<I>>>,
        staging: usize,
        config: &'scope HostAdamWConfig,
        args: AdamWStep,
    ) -> Self {
        let (jobs, queue) = channel::<Update<HostRead>>();
        let (results, outcomes) = channel();
        if !updates.is_empty() {
            scope.spawn(move || {
                for job in queue {
                    if results.send(job.run(config, args)).is_err() {
                        return;
                    }
                }
            });
        }
        let mut pipeline = Self {
            waiting: updates.into(),
            staging,
            underway: 0,
            jobs,
            outcomes,
            done: HashMap::new(),
        };
        pipeline.fill();
        pipeline
    }

    /// Waits for a parameter; `None` if it has no update. They are updated in the order of the updates.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Parameter`].
    pub(super) fn take(&mut self, id: ParamId) -> Result<Option<Updated>, OffloadError> {
        loop {
            if let Some(done) = self.done.remove(&id) {
                return Ok(Some(done));
            }
            if self.underway == 0 {
                return Ok(None);
            }
            let outcome = self.outcomes.recv();
            let (id, done) = outcome.expect("the worker has said why it ended")?;
            self.underway -= 1;
            self.done.insert(id, done);
            // Before this one is uploaded: the worker is not to wait.
            self.fill();
        }
    }

    /// Starts downloads.
    fn fill(&mut self) {
        while self.underway < self.staging
            && let Some(update) = self.waiting.pop_front()
        {
            self.underway += 1;
            // A worker that has ended is noticed by `take`.
            let _ = self.jobs.send(Update {
                id: update.id,
                path: update.path,
                start: update.start,
                value: update.value.map(HostRead::start::<I>),
                gradient: HostRead::start::<I>(update.gradient),
            });
        }
    }
}

impl Update<HostRead> {
    /// Waits for what is on its way, and updates.
    fn run(self, config: &HostAdamWConfig, args: AdamWStep) -> Outcome {
        let Self {
            id, path, start, ..
        } = self;
        let value = self.value.map(HostRead::data);
        let gradient = self.gradient.data();
        if !is_finite(&gradient) {
            log::warn!(
                "{path}: the gradient is not finite, and so will be its moments: skip such steps with a loss scaler"
            );
        }
        let update = || {
            let mut state = HostState::start(start, value, config, &path)?;
            let own = Arc::get_mut(&mut state).expect("started with one owner");
            let value = own.update(args, gradient)?;
            Ok(Updated { state, value })
        };
        match update() {
            Ok(updated) => Ok((id, updated)),
            Err(source) => Err(OffloadError::Parameter {
                path: path.clone(),
                source: Box::new(source),
            }),
        }
    }
}

impl HostState {
    /// The state to update, of one owner. A value that the master does not round to becomes the master.
    fn start(
        start: Start,
        value: Option<TensorData>,
        config: &HostAdamWConfig,
        path: &str,
    ) -> Result<Arc<Self>, OffloadError> {
        const NEEDED: &str = "a parameter's first step comes with its value";
        let mut state = match start {
            Start::Known(state)
                if Arc::strong_count(&state) == 1 && state.adamw.config() == config =>
            {
                state
            }
            // Another optimizer or a record has it too.
            Start::Known(state) => Arc::new(Self {
                adamw: HostAdamW::from_state(config.clone(), state.adamw.state())?,
                shape: state.shape.clone(),
                dtype: state.dtype,
            }),
            Start::Saved(saved) => {
                let value = value.as_ref().expect(NEEDED);
                let momentum = &saved.momentum;
                let state = AdamWState {
                    steps: momentum.time as u64,
                    master: &widened(saved.master.as_ref().unwrap_or(value)),
                    moment_1: &widened(&momentum.moment_1),
                    moment_2: &widened(&momentum.moment_2),
                };
                Self::of(value, HostAdamW::from_state(config.clone(), state)?)
            }
            Start::New => {
                let value = value.as_ref().expect(NEEDED);
                Self::of(value, HostAdamW::new(config.clone(), &widened(value))?)
            }
        };
        if let Some(value) = value {
            let own = Arc::get_mut(&mut state).expect("copied where it had others");
            if !own.rounds_to(&value) {
                copy(&floats(value), own.adamw.master_mut());
                log::info!(
                    "{path}: the weights were changed since the last step, and the host follows"
                );
            }
        }
        Ok(state)
    }

    fn of(value: &TensorData, adamw: HostAdamW) -> Arc<Self> {
        Arc::new(Self {
            adamw,
            shape: value.shape.to_vec(),
            dtype: value.dtype,
        })
    }

    /// Whether this is the parameter's value to the bit.
    fn rounds_to(&self, value: &TensorData) -> bool {
        fn same<E: Element + Sync, Bits: PartialEq>(
            master: &[f32],
            value: &TensorData,
            bits: impl Fn(E) -> Bits + Sync,
            round: impl Fn(f32) -> E + Sync,
        ) -> bool {
            let Ok(value) = value.as_slice::<E>() else {
                return false;
            };
            let pairs = master.par_iter().zip(value.par_iter());
            pairs.all(|(master, value)| bits(round(*master)) == bits(*value))
        }
        let master = self.adamw.master();
        match self.dtype {
            DType::BF16 => same(master, value, bf16::to_bits, bf16::from_f32),
            DType::F16 => same(master, value, f16::to_bits, f16::from_f32),
            _ => same(master, value, f32::to_bits, |x| x),
        }
    }

    /// A step: the new value of the parameter, in its own type.
    fn update(
        &mut self,
        args: AdamWStep,
        gradient: TensorData,
    ) -> Result<TensorData, OffloadError> {
        let gradient = match gradient.dtype {
            DType::F32 | DType::BF16 | DType::F16 => gradient,
            _ => gradient.convert_dtype(DType::F32),
        };
        let (elements, shape) = (self.adamw.len(), self.shape.clone());
        let adamw = &mut self.adamw;
        match self.dtype {
            DType::BF16 => {
                let mut out = vec![bf16::ZERO; elements];
                adamw.step(args, view(&gradient), Some(ParamsOut::Bf16(&mut out)))?;
                Ok(TensorData::new(out, shape))
            }
            DType::F16 => {
                let mut out = vec![f16::ZERO; elements];
                adamw.step(args, view(&gradient), Some(ParamsOut::F16(&mut out)))?;
                Ok(TensorData::new(out, shape))
            }
            _ => {
                adamw.step(args, view(&gradient), None)?;
                // The gradient's memory takes the parameter back.
                let mut out = floats(gradient);
                copy(adamw.master(), &mut out);
                Ok(TensorData::new(out, shape))
            }
        }
    }
}

const ALIGNED: &str = "elements of the type that the data says";

fn view(data: &TensorData) -> Gradients<'_> {
    match data.dtype {
        DType::BF16 => Gradients::Bf16(data.as_slice().expect(ALIGNED)),
        DType::F16 => Gradients::F16(data.as_slice().expect(ALIGNED)),
        _ => Gradients::F32(data.as_slice().expect(ALIGNED)),
    }
}

/// The elements in f32.
fn widened(data: &TensorData) -> Cow<'_, [f32]> {
    match data.dtype {
        DType::F32 => Cow::Borrowed(data.as_slice().expect(ALIGNED)),
        _ => Cow::Owned(floats(data.clone())),
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;
    use burn_flex::Flex;

    use super::*;

    /// Of a parameter of two elements.
    fn update(gradient: &[f32]) -> Update<FloatTensor<Flex>> {
        let tensor = |values: &[f32]| {
            let tensor = Tensor::<Flex, 1>::from_data(values, &Default::default());
            tensor.into_primitive().tensor()
        };
        Update {
            id: ParamId::new(),
            path: "blocks.0.weight".to_owned(),
            start: Start::New,
            value: Some(tensor(&[1.0, 2.0])),
            gradient: tensor(gradient),
        }
    }

    #[test]
    fn no_more_parameters_are_under_way_than_staging_says() {
        let config = HostAdamWConfig::default();
        for staging in [1, 3, 20] {
            std::thread::scope(|scope| {
                let updates: Vec<_> = (0..10).map(|_| update(&[0.5, -0.5])).collect();
                let ids: Vec<_> = updates.iter().map(|update| update.id).collect();
                let mut pipeline =
                    Pipeline::<Flex>::start(scope, updates, staging, &config, config.at(0.25));
                for (taken, &id) in ids.iter().enumerate() {
                    assert_eq!(pipeline.underway, staging.min(ids.len() - taken));
                    let done = pipeline.take(id).unwrap().unwrap();
                    let value = done.value.into_vec::<f32>().unwrap();
                    assert!(value[0] < 1.0 && value[1] > 2.0);
                }
                assert!(pipeline.take(ParamId::new()).unwrap().is_none());
            });
        }
    }

    #[test]
    fn a_parameter_that_cannot_be_updated_is_named() {
        let config = HostAdamWConfig::default();
        std::thread::scope(|scope| {
            let updates = vec![update(&[0.5])];
            let id = updates[0].id;
            let mut pipeline = Pipeline::<Flex>::start(scope, updates, 3, &config, config.at(0.25));
            let Err(error) = pipeline.take(id) else {
                panic!("a gradient of another length was taken");
            };
            assert!(error.to_string().contains("blocks.0.weight"));
        });
    }
}
