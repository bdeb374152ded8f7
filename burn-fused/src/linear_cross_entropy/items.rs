//! What each row is to be compared with, and how much it counts.

use std::ops::Range;

use burn::nn::loss::Reduction;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, DType, ElementConversion, Int, Tensor};
use burn_backend::get_device_settings;
use thiserror::Error;

use super::config::{LinearCrossEntropyLossConfig, OutOfRange};
use super::tracking::untracked;

/// The class of each row, and how much it counts. A tensor of classes converts into it: every row
/// counts once.
#[derive(Clone, Debug)]
pub struct Targets<B: Backend> {
    classes: Tensor<B, 1, Int>,
    weights: Option<Tensor<B, 1>>,
}

impl<B: Backend> Targets<B> {
    /// Each row counts as much as its weight: `[rows]`. No gradient flows into weights, and those
    /// of rows that are ignored are not read.
    pub fn weighted(classes: Tensor<B, 1, Int>, weights: Tensor<B, 1>) -> Self {
        let weights = Some(weights);
        Self { classes, weights }
    }
}

impl<B: Backend> From<Tensor<B, 1, Int>> for Targets<B> {
    fn from(classes: Tensor<B, 1, Int>) -> Self {
        Self {
            classes,
            weights: None,
        }
    }
}

/// A target is no class, and is not ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("target {target} of row {row} is out of range: there are {classes} classes, from 0 on")]
pub struct TargetOutOfRange {
    /// The row of the first target that is out of range.
    pub row: usize,
    /// Its value.
    pub target: i64,
    /// Number of classes.
    pub classes: usize,
}

/// Targets as a chunk needs them.
pub(super) struct Items<B: Backend> {
    /// 0 where ignored: `[rows, 1]`.
    pub classes: Tensor<B, 2, Int>,
    /// What a row's loss is multiplied with: its weight, over the divisor of the reduction:
    /// `[rows, 1]`.
    pub factors: Tensor<B, 2>,
    /// `[rows, 1]`
    pub ignored: Option<Tensor<B, 2, Bool>>,
}

impl<B: Backend> Items<B> {
    /// The items, and the sum of weights that count: `[1]`.
    pub fn new(
        targets: Targets<B>,
        rows: usize,
        classes: usize,
        dtype: DType,
        config: &LinearCrossEntropyLossConfig,
    ) -> Result<(Self, Tensor<B, 1>), TargetOutOfRange> {
        let (mut targets, weights) = (targets.classes, targets.weights);
        assert!(rows > 0, "at least one row");
        let device = targets.device();
        assert_eq!(targets.dims(), [rows], "a target for each of {rows} rows");
        // Other types, such as the u8 of a text's bytes, may hold neither the number of classes nor
        // a negative `ignore_index`.
        if !matches!(targets.dtype(), DType::I64 | DType::I32) {
            targets = targets.cast(get_device_settings::<B>(&device).int_dtype);
        }
        let ignored = config.ignore_index;
        let ignored = ignored.map(|index| targets.clone().equal_elem(index));
        let mut indices = targets.clone();
        let ones = || Tensor::ones([rows], (&device, dtype));
        let mut weights = weights.map_or_else(ones, |weights| untracked(weights).cast(dtype));
        assert_eq!(weights.dims(), [rows], "a weight for each of {rows} rows");
        if let Some(ignored) = &ignored {
            indices = indices.mask_fill(ignored.clone(), 0);
            weights = weights.mask_fill(ignored.clone(), 0);
        }
        let total = weights.clone().sum();
        let mut factors = match config.reduction {
            Reduction::Sum => weights,
            Reduction::BatchMean => weights.div_scalar(rows as f64),
            // If no row counts the factors are 0, not 0 / 0.
            _ => weights / total.clone().mask_fill(total.clone().equal_elem(0), 1),
        };
        let no_class = indices.clone().lower_elem(0);
        let no_class = no_class.bool_or(indices.clone().greater_equal_elem(classes as i64));
        if config.out_of_range == OutOfRange::Nan {
            indices = indices.mask_fill(no_class.clone(), 0);
            factors = factors.mask_fill(no_class, f32::NAN);
        } else if no_class.clone().int().sum().into_scalar().elem::<i64>() > 0 {
            let row = no_class.into_data().iter().position(|wrong: bool| wrong);
            let row = row.expect("it was counted");
            let target = targets.narrow(0, row, 1).into_scalar().elem();
            return Err(TargetOutOfRange {
                row,
                target,
                classes,
            });
        }
        let items = Self {
            classes: indices.unsqueeze_dim(1),
            factors: factors.unsqueeze_dim(1),
            ignored: ignored.map(|ignored| ignored.unsqueeze_dim(1)),
        };
        Ok((items, total))
    }

    /// The items of some rows.
    pub fn of_rows(&self, rows: Range<usize>) -> Self {
        let place = [rows, 0..1];
        Self {
            classes: self.classes.clone().slice(place.clone()),
            factors: self.factors.clone().slice(place.clone()),
            ignored: self.ignored.clone().map(|ignored| ignored.slice(place)),
        }
    }
}
