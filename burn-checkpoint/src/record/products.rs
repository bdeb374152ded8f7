//! How many multiplications a product takes, from the shapes of its operands.

use burn_backend::Shape;

/// The sizes of an operand.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operand {
    elements: f64,
    last_dim: f64,
    /// Rows of the matrix, or of each of the matrices.
    rows: f64,
    /// Elements of a kernel that belong to one channel of its first dimension.
    window: f64,
}

impl Operand {
    pub fn new(shape: &Shape) -> Self {
        let dims = shape.as_slice();
        let dim = |dim: Option<&usize>| dim.map_or(1.0, |dim| *dim as f64).max(1.0);
        let elements = shape.num_elements() as f64;
        Self {
            elements,
            last_dim: dim(dims.last()),
            rows: dim(dims.iter().nth_back(1)),
            window: elements / dim(dims.first()),
        }
    }
}

/// Multiplications that give a result of so many elements from the first three operands.
pub(crate) fn multiplications(op: &str, [a, b, c]: &[Operand; 3], elements: f64) -> f64 {
    match op {
        // [d, k] and [.., n, k]: the features of the result add up over k.
        "linear_x_backward" => elements * b.last_dim,
        "linear_weight_backward" => elements * (a.elements / a.last_dim),
        // Scores of [.., n, d] and [.., t, d], and the sum of t values for each element of the
        // result.
        "attention" => (a.elements + elements) * b.rows,
        // x, offsets, weight.
        "deform_conv2d" | "deform_conv2d_backward" => elements * c.window,
        // A kernel [in, out, ..] spreads each element of x.
        _ if op.starts_with("conv_transpose") && op.ends_with("_x_backward") => elements * a.window,
        _ if op.starts_with("conv_transpose") => a.elements * b.window,
        // A kernel [out, in, ..] gathers each element of the result. Operands of backward: x,
        // weight, gradient.
        _ if op.starts_with("conv") && op.ends_with("_backward") => c.elements * b.window,
        _ if op.starts_with("conv") => elements * b.window,
        // [.., m, k] and [.., k, n].
        _ => elements * a.last_dim,
    }
}

#[cfg(test)]
mod tests {
    use super::{Operand, multiplications};

    /// Counted by hand: a loop over every dimension of the result, and inside of it over what is
    /// added up.
    #[test]
    fn products_are_counted() {
        type Dims = &'static [usize];
        // A batch of 2, 3 rows, 5 inputs, 7 outputs.
        let (x, weight, y): (Dims, Dims, Dims) = (&[2, 3, 5], &[5, 7], &[2, 3, 7]);
        let linear = 2 * 3 * 5 * 7;
        // Batch 2, heads 3, 5 queries, 7 keys, 11 features, 13 features of the values: two
        // products.
        let [q, k, v]: [Dims; 3] = [&[2, 3, 5, 11], &[2, 3, 7, 11], &[2, 3, 7, 13]];
        let attention = 2 * 3 * 5 * 7 * (11 + 13);
        // A convolution, its gradients, its transpose (a gradient): batch 2, 4 channels of 10x10 to
        // 6 of 8x8, kernel 3x3, two groups.
        let [image, kernel, out]: [Dims; 3] = [&[2, 4, 10, 10], &[6, 2, 3, 3], &[2, 6, 8, 8]];
        let conv = 2 * 6 * 8 * 8 * 2 * 3 * 3;
        let of_conv: &[Dims] = &[image, kernel, out];
        let cases: [(&str, &[Dims], Dims, usize); 13] = [
            ("float_matmul", &[x, &[2, 5, 7]], y, linear),
            ("float_matmul", &[x, &[1, 5, 7]], y, linear),
            ("linear", &[x, weight, &[7]], y, linear),
            ("linear_x_backward", &[weight, y], x, linear),
            ("linear_weight_backward", &[x, y], weight, linear),
            ("attention", &[q, k, v], &[2, 3, 5, 13], attention),
            ("conv2d", &[image, kernel], out, conv),
            ("conv2d_x_backward", of_conv, image, conv),
            ("conv2d_weight_backward", of_conv, kernel, conv),
            ("conv_transpose2d", &[out, kernel], image, conv),
            ("conv_transpose2d_x_backward", &[kernel, image], out, conv),
            (
                "conv_transpose2d_weight_backward",
                &[out, kernel, image],
                kernel,
                conv,
            ),
            ("deform_conv2d", &[image, &[2, 18, 8, 8], kernel], out, conv),
        ];
        for (op, shapes, result, expected) in cases {
            let mut operands = [Operand::default(); 3];
            for (operand, shape) in operands.iter_mut().zip(shapes) {
                *operand = Operand::new(&shape.to_vec().into());
            }
            let elements = result.iter().product::<usize>() as f64;
            let found = multiplications(op, &operands, elements);
            assert_eq!(found, expected as f64, "{op} of {shapes:?}");
        }
    }
}
