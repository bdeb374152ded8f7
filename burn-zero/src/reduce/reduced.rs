//! A gradient reduced over all ranks.

use burn_backend::TensorData;

use super::layout::Parameter;

/// The reduced gradient of a parameter: this rank's shard of it, or all of it in stage 0.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reduced {
    /// The elements, flat; empty if this rank holds none.
    pub(crate) elements: Vec<f32>,
    pub(crate) state: State,
}

/// What is known about a gradient, the same on all ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    /// No rank has one.
    #[default]
    Missing,
    Finite,
    /// The reduced gradient has an infinite or NaN element on some rank.
    NonFinite,
}

impl Reduced {
    /// Whether any rank has this gradient.
    pub(crate) fn is_present(&self) -> bool {
        self.state != State::Missing
    }

    /// Whether the reduced gradient is non-finite on any rank.
    pub(crate) fn is_non_finite(&self) -> bool {
        self.state == State::NonFinite
    }

    /// The gradient in its [`piece_shape`](Parameter::piece_shape); `None` if no rank has one.
    pub(crate) fn into_piece(self, parameter: &Parameter) -> Option<TensorData> {
        let mut elements = self.elements;
        // A rank without elements gets a single zero, so that all ranks see a gradient of the same parameters.
        if elements.is_empty() {
            elements.push(0.0);
        }
        match self.state {
            State::Missing => return None,
            State::Finite => {}
            State::NonFinite => elements.fill(f32::NAN),
        }
        let shape = parameter.piece_shape(elements.len());
        Some(TensorData::new(elements, shape).convert_dtype(parameter.dtype))
    }
}
