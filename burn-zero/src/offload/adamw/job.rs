//! The update of one parameter, on the host.

use std::sync::Arc;

use burn::module::ParamId;
use burn::tensor::{DType, TensorData};
use half::{bf16, f16};

use super::state::{HostState, Saved, copy};
use crate::host::{HostRead, floats, is_finite};
use crate::offload::{AdamWStep, Gradients, HostAdamWConfig, HostAdamWError, ParamsOut};

/// The update of a parameter, on its way to the host.
pub(super) struct Job {
    pub(super) id: ParamId,
    pub(super) path: String,
    pub(super) from: From,
    pub(super) value: Option<HostRead>,
    pub(super) gradient: HostRead,
}

/// What an update starts from.
pub(super) enum From {
    Going(Arc<HostState>),
    /// Comes with a value.
    Saved(Box<Saved>),
    /// Comes with a value.
    Nothing,
}

/// An updated parameter.
pub(super) struct Done {
    pub(super) state: Arc<HostState>,
    pub(super) value: TensorData,
}

impl Job {
    /// Waits for what is on its way.
    pub(super) fn run(
        self,
        config: &HostAdamWConfig,
        args: AdamWStep,
    ) -> Result<Done, HostAdamWError> {
        let value = self.value.map(HostRead::data);
        let mut state = begin(self.from, value, config, &self.path)?;
        let own = Arc::get_mut(&mut state).expect("begun with one owner");
        let gradient = self.gradient.data();
        if !is_finite(&gradient) {
            log::warn!(
                "{}: the gradient is not finite, and so will be its moments: skip such steps with a loss scaler",
                self.path
            );
        }
        let value = update(own, args, gradient)?;
        Ok(Done { state, value })
    }
}

/// The state to update, of one owner.
fn begin(
    from: From,
    value: Option<TensorData>,
    config: &HostAdamWConfig,
    path: &str,
) -> Result<Arc<HostState>, HostAdamWError> {
    let (mut state, value) = match (from, value) {
        (From::Going(state), value) => {
            let is_own = Arc::strong_count(&state) == 1 && state.adamw.config() == config;
            let state = match is_own {
                true => state,
                // Another optimizer or a record has it too.
                false => Arc::new(state.copy(config)?),
            };
            (state, value)
        }
        (From::Saved(saved), Some(value)) => {
            let state = HostState::from_saved(config, *saved, value.clone())?;
            (Arc::new(state), Some(value))
        }
        (From::Nothing, Some(value)) => (Arc::new(HostState::new(config, value)?), None),
        (From::Saved(_) | From::Nothing, None) => {
            unreachable!("a parameter's first step comes with its value")
        }
    };
    if let Some(value) = value {
        let own = Arc::get_mut(&mut state).expect("copied where it had others");
        if own.follow(value) {
            log::info!(
                "{path}: the weights were changed since the last step, and the host follows"
            );
        }
    }
    Ok(state)
}

/// A step of one parameter: its new value, in its own type.
fn update(
    state: &mut HostState,
    args: AdamWStep,
    gradient: TensorData,
) -> Result<TensorData, HostAdamWError> {
    let adamw = &mut state.adamw;
    let gradient = match gradient.dtype {
        DType::F32 | DType::BF16 | DType::F16 => gradient,
        _ => gradient.convert_dtype(DType::F32),
    };
    let elements = adamw.len();
    let shape = state.shape.clone();
    match state.dtype {
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

fn view(data: &TensorData) -> Gradients<'_> {
    const ALIGNED: &str = "elements of the type that the data says";
    match data.dtype {
        DType::BF16 => Gradients::Bf16(data.as_slice().expect(ALIGNED)),
        DType::F16 => Gradients::F16(data.as_slice().expect(ALIGNED)),
        _ => Gradients::F32(data.as_slice().expect(ALIGNED)),
    }
}
