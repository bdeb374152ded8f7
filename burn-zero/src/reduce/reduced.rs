//! A gradient that all ranks have added to.

use burn_backend::TensorData;

use super::layout::Parameter;

/// The reduced gradient of a parameter: this rank's piece of it, or all of it in stage 0.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reduced {
    /// The elements, flat; empty if this rank holds none.
    pub(crate) elements: Vec<f32>,
    pub(crate) state: State,
}

/// What the ranks agreed on about a gradient.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    /// No rank has one.
    #[default]
    Missing,
    Finite,
    /// Some rank has, or the sum over the ranks is, infinite or NaN.
    NonFinite,
}

impl Reduced {
    /// Whether any rank has this gradient.
    pub(crate) fn is_present(&self) -> bool {
        self.state != State::Missing
    }

    /// As [`piece_shape`](Parameter::piece_shape) says; `None` if there is no gradient.
    pub(crate) fn into_piece(self, parameter: &Parameter) -> Option<TensorData> {
        let mut elements = self.elements;
        // A rank without elements takes part with a zero: it must meet what all ranks meet.
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
