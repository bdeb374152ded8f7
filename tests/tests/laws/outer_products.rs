//! Law: the product of a column and a row, which adds nothing up, is not lowered.

use burn::backend::Autodiff;
use burn::tensor::{DType, Tensor};
use burn_amp::{Autocast, Bf16};
use burn_flex::Flex;
use tests::compare::values;

type B = Autocast<Autodiff<Flex>, Bf16>;

/// A rotary embedding's angles: bf16 has no odd number above 256.
#[test]
fn positions_times_frequencies_keep_their_digits() {
    let device = Default::default();
    let positions = Tensor::<B, 1>::from_floats([257.0, 1001.0, 4095.0], &device).reshape([3, 1]);
    let frequencies = Tensor::<B, 1>::from_floats([1.0, 0.3], &device).reshape([1, 2]);
    let angles = positions.matmul(frequencies);
    assert_eq!(angles.dtype(), DType::F32);
    let expected = [
        257.0,
        257.0 * 0.3,
        1001.0,
        1001.0 * 0.3,
        4095.0,
        4095.0 * 0.3,
    ];
    assert_eq!(values(angles), expected);
}

#[test]
fn low_columns_and_rows_stay_low() {
    let device = Default::default();
    let column = Tensor::<B, 2>::ones([3, 1], &device).cast(DType::BF16);
    let product = column.clone().matmul(column.transpose());
    assert_eq!(product.dtype(), DType::BF16);
}
