//! Updates of parameters on the host: while one is updated, the gradients of the next are downloaded and the last one is uploaded.
//!
//! ```text
//! device to host   gradient 1 | gradient 2 | gradient 3 | ..
//! this thread      update 0   | update 1   | update 2   | ..    on all cores
//! host to device              | value 0    | value 1    | ..
//! ```

use std::borrow::Cow;
use std::collections::VecDeque;
use std::sync::Arc;

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
    /// Type of the parameter; the master is f32.
    pub(super) dtype: DType,
}

/// The state that an update starts from.
pub(super) enum Start {
    /// State of earlier steps.
    Known(Arc<HostState>),
    /// State of a record. The update has a value.
    Saved(Arc<StateItem>),
    /// No state. The update has a value.
    New,
}

/// The update of a parameter: with tensors on the device, or with started downloads.
pub(super) struct Update<T> {
    pub(super) id: ParamId,
    pub(super) path: String,
    pub(super) start: Start,
    /// The parameter, if the host has no current copy.
    pub(super) value: Option<T>,
    pub(super) gradient: T,
}

/// Updates in the order of the module, of which a limited number are being downloaded.
pub(super) struct Downloads<I: Backend> {
    waiting: VecDeque<Update<FloatTensor<I>>>,
    underway: VecDeque<Update<HostRead>>,
    staging: usize,
}

impl<I: Backend> Downloads<I> {
    pub(super) fn new(updates: Vec<Update<FloatTensor<I>>>, staging: usize) -> Self {
        Self {
            waiting: updates.into(),
            underway: VecDeque::new(),
            staging,
        }
    }

    /// Takes the update of a parameter; `None` if it has none.
    pub(super) fn take(&mut self, id: ParamId) -> Option<Update<HostRead>> {
        loop {
            while self.underway.len() < self.staging
                && let Some(update) = self.waiting.pop_front()
            {
                self.underway.push_back(update.start_download::<I>());
            }
            if let Some(at) = self.underway.iter().position(|update| update.id == id) {
                return self.underway.remove(at);
            }
            // A module may be mapped in another order than it is visited in: search on.
            let update = self.waiting.pop_front()?;
            self.underway.push_back(update.start_download::<I>());
        }
    }
}

impl<T> Update<T> {
    fn start_download<I: Backend<FloatTensorPrimitive = T>>(self) -> Update<HostRead> {
        Update {
            id: self.id,
            path: self.path,
            start: self.start,
            value: self.value.map(HostRead::start::<I>),
            gradient: HostRead::start::<I>(self.gradient),
        }
    }
}

impl Update<HostRead> {
    /// Waits for the downloads, and updates. Returns the new state and value.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Parameter`].
    pub(super) fn run(
        self,
        config: &HostAdamWConfig,
        args: AdamWStep,
    ) -> Result<(Arc<HostState>, TensorData), OffloadError> {
        let path = self.path;
        let value = self.value.map(HostRead::data);
        let gradient = self.gradient.data();
        if !is_finite(&gradient) {
            log::warn!(
                "{path}: the gradient is not finite, and so will be its moments: skip such steps with a loss scaler"
            );
        }
        let updated = HostState::start(self.start, value, config, &path).and_then(|mut state| {
            let own = Arc::get_mut(&mut state).expect("started with one owner");
            let value = own.update(args, gradient)?;
            Ok((state, value))
        });
        updated.map_err(|source| OffloadError::Parameter {
            path,
            source: Box::new(source),
        })
    }
}

impl HostState {
    /// The state to update, with a single owner. A value that the master does not round to becomes the master.
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
            // A clone of the optimizer or a record shares the state: copy it.
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

    /// Whether the master, rounded, is the parameter's value bit for bit.
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
                // The gradient's memory is reused for the new parameter.
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
            let updates: Vec<_> = (0..10).map(|_| update(&[0.5, -0.5])).collect();
            let ids: Vec<_> = updates.iter().map(|update| update.id).collect();
            let mut downloads = Downloads::<Flex>::new(updates, staging);
            for (taken, &id) in ids.iter().enumerate() {
                let update = downloads.take(id).unwrap();
                let left = ids.len() - taken;
                assert_eq!(downloads.underway.len() + 1, staging.min(left));
                let (_, value) = update.run(&config, config.at(0.25)).unwrap();
                let value = value.into_vec::<f32>().unwrap();
                assert!(value[0] < 1.0 && value[1] > 2.0);
            }
            assert!(downloads.take(ParamId::new()).is_none());
        }
    }

    #[test]
    fn updates_are_found_in_any_order_and_errors_name_the_parameter() {
        let config = HostAdamWConfig::default();
        let updates: Vec<_> = (0..4).map(|_| update(&[0.5])).collect();
        let ids: Vec<_> = updates.iter().map(|update| update.id).collect();
        let mut downloads = Downloads::<Flex>::new(updates, 1);
        for id in [ids[2], ids[0], ids[3], ids[1]] {
            let update = downloads.take(id).unwrap();
            // A gradient of another length.
            let error = update.run(&config, config.at(0.25)).unwrap_err();
            assert!(error.to_string().contains("blocks.0.weight"));
        }
    }
}
