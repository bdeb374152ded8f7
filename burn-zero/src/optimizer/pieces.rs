//! What the wrapped optimizer meets of the gradients and the parameters.

use core::ops::Range;

use burn::module::AutodiffModule;
use burn::tensor::{Shape, TensorMetadata};
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, FloatDType, Slice};

use super::parameters::Parameters;
use crate::ZeroOptimizerError;
use crate::host::HostRead;
use crate::reduce::Layout;

/// Reduced gradients, as far as this rank holds their parameters.
pub(super) struct Pieces<I: Backend> {
    /// With the positions of their parameters, in the shape in which the wrapped optimizer meets them.
    pub(super) held: Vec<(usize, FloatTensor<I>)>,
    /// Whether any rank has a gradient of each parameter.
    pub(super) present: Vec<bool>,
}

impl<I: Backend> Pieces<I> {
    /// # Errors
    ///
    /// [`ZeroOptimizerError::ForeignGradient`].
    pub(super) fn new(
        layout: &Layout,
        gradients: Vec<Option<FloatTensor<I>>>,
    ) -> Result<Self, ZeroOptimizerError> {
        let present = gradients.iter().map(Option::is_some).collect();
        let mut held = Vec::new();
        for (parameter, gradient) in gradients.into_iter().enumerate() {
            let Some(gradient) = gradient else { continue };
            // A rank that holds nothing of a parameter meets a single zero.
            let expected = layout.held(parameter);
            check::<I>(layout, parameter, &gradient, expected.max(1))?;
            if expected > 0 {
                let shape = Shape::from(layout.piece_shape(parameter));
                held.push((parameter, I::float_reshape(gradient, shape)));
            }
        }
        Ok(Self { held, present })
    }
}

/// # Errors
///
/// [`ZeroOptimizerError::ForeignGradient`] unless these are gradients of whole parameters.
pub(super) fn check_whole<I: Backend>(
    layout: &Layout,
    gradients: &[Option<FloatTensor<I>>],
) -> Result<(), ZeroOptimizerError> {
    for (parameter, gradient) in gradients.iter().enumerate() {
        if let Some(gradient) = gradient {
            let whole = layout.parameters()[parameter].elements();
            check::<I>(layout, parameter, gradient, whole)?;
        }
    }
    Ok(())
}

fn check<I: Backend>(
    layout: &Layout,
    parameter: usize,
    gradient: &FloatTensor<I>,
    expected: usize,
) -> Result<(), ZeroOptimizerError> {
    let elements = gradient.shape().num_elements();
    if elements == expected || layout.parameters()[parameter].elements() == 0 {
        return Ok(());
    }
    Err(ZeroOptimizerError::ForeignGradient {
        path: layout.parameters()[parameter].path.clone(),
        elements,
        expected,
    })
}

/// This rank's pieces of the parameters, with their positions.
pub(super) fn cut<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: &M,
    parameters: &Parameters,
    layout: &Layout,
) -> Vec<(usize, FloatTensor<B>)> {
    let values = parameters.values::<B, M>(module).into_iter();
    let held = values.filter(|(parameter, _)| layout.held(*parameter) > 0);
    let pieces = held.map(|(parameter, value)| {
        let piece = cut_one::<B::InnerBackend>(layout, parameter, value);
        (parameter, B::from_inner(piece))
    });
    pieces.collect()
}

/// This rank's piece of a parameter.
pub(super) fn cut_one<I: Backend>(
    layout: &Layout,
    parameter: usize,
    value: FloatTensor<I>,
) -> FloatTensor<I> {
    let piece = match layout.holds_all() {
        true => value,
        false => pick::<I>(value, layout.shard(parameter)),
    };
    I::float_reshape(piece, Shape::from(layout.piece_shape(parameter)))
}

/// The sum of the squares of this rank's shard of the gradient. In stage 0 too, where it holds all: every stage finds the
/// same bits.
pub(super) fn squared_norm<I: Backend>(layout: &Layout, pieces: &[(usize, FloatTensor<I>)]) -> f64 {
    let own = pieces
        .iter()
        .filter(|(parameter, _)| !layout.shard(*parameter).is_empty());
    let squares = own.map(|(parameter, gradient)| {
        let mut gradient = gradient.clone();
        if layout.holds_all() {
            gradient = pick::<I>(gradient, layout.shard(*parameter));
        }
        let gradient = I::float_cast(gradient, FloatDType::F32);
        I::float_sum(I::float_mul(gradient.clone(), gradient))
    });
    let squares: Vec<_> = squares.collect();
    if squares.is_empty() {
        return 0.0;
    }
    let squares = HostRead::start::<I>(I::float_cat(squares, 0)).wait();
    squares.into_iter().map(f64::from).sum()
}

/// Some elements of a tensor, flat.
fn pick<I: Backend>(tensor: FloatTensor<I>, ranges: &[Range<usize>]) -> FloatTensor<I> {
    let elements = tensor.shape().num_elements();
    let flat = I::float_reshape(tensor, Shape::from(vec![elements]));
    let slice = |range: &Range<usize>| I::float_slice(flat.clone(), &[Slice::from(range.clone())]);
    match ranges {
        [all] if *all == (0..elements) => flat,
        [range] => slice(range),
        ranges => I::float_cat(ranges.iter().map(slice).collect(), 0),
    }
}
