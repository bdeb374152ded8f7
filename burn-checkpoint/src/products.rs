//! How many multiplications a product takes, from the shapes of its operands.

use burn_backend::Shape;

/// The sizes of an operand.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Operand {
    pub elements: f64,
    first_dim: f64,
    last_dim: f64,
    /// The product of all dimensions but the last two.
    batch: f64,
}

impl Operand {
    pub fn new(shape: &Shape) -> Self {
        let dims = shape.as_slice();
        let product = |dims: &[usize]| dims.iter().map(|dim| *dim as f64).product::<f64>();
        let dim = |dim: Option<&usize>| dim.map_or(1.0, |dim| *dim as f64).max(1.0);
        Self {
            elements: product(dims),
            first_dim: dim(dims.first()),
            last_dim: dim(dims.last()),
            batch: product(&dims[..dims.len().saturating_sub(2)]).max(1.0),
        }
    }

    /// Elements of a kernel that belong to one channel of its first dimension.
    fn window(&self) -> f64 {
        self.elements / self.first_dim
    }

    /// Rows of the matrix, or of each of the matrices.
    fn rows(&self) -> f64 {
        self.elements / self.last_dim / self.batch
    }
}

/// Multiplications that give a result of so many elements from the first three operands.
pub(crate) fn multiplications(op: &str, [a, b, c]: &[Operand; 3], elements: f64) -> f64 {
    match op {
        // [d, k] and [.., n, k]: the features of the result add up over k.
        "linear_x_backward" => elements * b.last_dim,
        "linear_weight_backward" => elements * (a.elements / a.last_dim),
        // Scores of [.., n, d] and [.., t, d], and the sum of t values for each element of the result.
        "attention" => (a.elements + elements) * b.rows(),
        // x, offsets, weight.
        "deform_conv2d" | "deform_conv2d_backward" => elements * c.window(),
        // A kernel [in, out, ..] spreads each element of x.
        _ if op.starts_with("conv_transpose") => match op {
            _ if op.ends_with("_x_backward") => elements * a.window(),
            _ => a.elements * b.window(),
        },
        // A kernel [out, in, ..] gathers each element of the result. Operands of backward: x, weight, gradient.
        _ if op.starts_with("conv") => match op {
            _ if op.ends_with("_backward") => c.elements * b.window(),
            _ => elements * b.window(),
        },
        // [.., m, k] and [.., k, n].
        _ => elements * a.last_dim,
    }
}

#[cfg(test)]
mod tests {
    use super::{Operand, multiplications};

    fn of<const N: usize>(op: &str, shapes: [&[usize]; N], result: &[usize]) -> f64 {
        let mut operands = [Operand::default(); 3];
        for (operand, shape) in operands.iter_mut().zip(shapes) {
            *operand = Operand::new(&shape.to_vec().into());
        }
        multiplications(op, &operands, result.iter().product::<usize>() as f64)
    }

    /// Counted by hand: a loop over every dimension of the result, and inside of it over what is added up.
    #[test]
    fn products_are_counted() {
        let matmul = 2 * 3 * 5 * 7;
        assert_eq!(
            of("float_matmul", [&[2, 3, 5], &[2, 5, 7]], &[2, 3, 7]),
            matmul as f64
        );
        assert_eq!(
            of("float_matmul", [&[2, 3, 5], &[1, 5, 7]], &[2, 3, 7]),
            matmul as f64,
            "broadcast"
        );
        let linear = 2 * 3 * 5 * 7;
        assert_eq!(
            of("linear", [&[2, 3, 5], &[5, 7], &[7]], &[2, 3, 7]),
            linear as f64
        );
        assert_eq!(
            of("linear_x_backward", [&[5, 7], &[2, 3, 7]], &[2, 3, 5]),
            linear as f64
        );
        assert_eq!(
            of("linear_weight_backward", [&[2, 3, 5], &[2, 3, 7]], &[5, 7]),
            linear as f64
        );
    }

    #[test]
    fn attention_has_two_products() {
        // Batch 2, heads 3, 5 queries, 7 keys, 11 features, 13 features of the values.
        let shapes: [&[usize]; 3] = [&[2, 3, 5, 11], &[2, 3, 7, 11], &[2, 3, 7, 13]];
        let work = 2 * 3 * 5 * 7 * (11 + 13);
        assert_eq!(of("attention", shapes, &[2, 3, 5, 13]), work as f64);
    }

    /// A convolution, its gradients, and its transpose, which is its gradient.
    #[test]
    fn convolutions_are_counted() {
        // Batch 2, 4 channels of 10x10 to 6 of 8x8, kernel 3x3, two groups.
        let (x, weight, y): (&[usize], &[usize], &[usize]) =
            (&[2, 4, 10, 10], &[6, 2, 3, 3], &[2, 6, 8, 8]);
        let work = (2 * 6 * 8 * 8 * 2 * 3 * 3) as f64;
        assert_eq!(of("conv2d", [x, weight], y), work);
        assert_eq!(of("conv2d_x_backward", [x, weight, y], x), work);
        assert_eq!(of("conv2d_weight_backward", [x, weight, y], weight), work);
        assert_eq!(of("conv_transpose2d", [y, weight], x), work);
        assert_eq!(of("conv_transpose2d_x_backward", [weight, x], y), work);
        assert_eq!(
            of("conv_transpose2d_weight_backward", [y, weight, x], weight),
            work
        );
        let offset: &[usize] = &[2, 18, 8, 8];
        assert_eq!(of("deform_conv2d", [x, offset, weight], y), work);
    }
}
