//! What operations take: `cargo bench --workspace --bench calibrate` prints what they take on Flex, on one thread, beside it.

use crate::op::{OpInfo, Work};

/// Nanoseconds to start any operation.
pub(super) const START_NS: f64 = 300.0;

/// Elements that a core's cache holds.
const CACHED: f64 = 262_144.0;

/// Nanoseconds an element, of those that fit the cache and of those beyond.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    cached: f64,
    memory: f64,
}

impl Rate {
    /// Nanoseconds of so many elements.
    pub fn ns(self, elements: f64) -> f64 {
        let cached = elements.min(CACHED);
        self.cached * cached + self.memory * (elements - cached)
    }
}

const fn rate(cached: f64, memory: f64) -> Rate {
    Rate { cached, memory }
}

/// A copy in another order.
pub(super) const COPY: Rate = rate(0.3, 1.2);

/// The rate of an operation that is no product. Those of a class differ less than the classes do, but for a few.
pub(super) fn of(op: &OpInfo) -> Rate {
    let is = |part: &str| op.name.contains(part);
    match op.work {
        Work::Sort if is("fft") => rate(6.5, 10.0),
        Work::Sort if is("arg") => rate(36.0, 56.0),
        Work::Sort => rate(23.0, 32.0),

        Work::Norm if is("layer_norm") => rate(0.6, 2.6),
        Work::Norm => rate(3.5, 7.0),

        Work::Math if is("powi") => rate(0.11, 0.9),
        Work::Math if is("tanh") || is("log1p") || is("atan") => rate(10.0, 11.0),
        Work::Math if is("remainder") || is("log_sigmoid") => rate(11.0, 13.0),
        Work::Math => rate(4.3, 5.5),

        Work::Reduce if is("prod") => rate(3.0, 1.7),
        Work::Reduce if is("max_dim") || is("min_dim") || is("arg") => rate(1.4, 2.2),
        Work::Reduce if is("cum") => rate(0.6, 2.0),
        Work::Reduce if is("int_") => rate(0.75, 2.3),
        Work::Reduce => rate(0.11, 0.22),

        Work::Index if is("gather") || is("scatter") => rate(1.7, 10.0),
        Work::Index if is("select") || is("embedding") => rate(0.16, 1.3),
        Work::Index if is("adaptive") => rate(1.8, 2.2),
        Work::Index if is("max_pool") => rate(22.0, 25.0),
        Work::Index if is("pool") => rate(7.0, 7.3),
        Work::Index if is("interpolate") => rate(12.0, 13.0),
        Work::Index => rate(19.0, 20.0),

        Work::Cheap if is("round") || is("floor") || is("ceil") || is("trunc") => rate(2.0, 2.3),
        Work::Cheap if is("cast") => rate(1.2, 6.0),
        Work::Cheap if is("sqrt") || is("into_int") => rate(0.85, 1.0),
        Work::Cheap if is("clamp") => rate(0.55, 0.7),
        Work::Cheap if is("repeat") || is("assign") => rate(0.2, 3.4),
        Work::Cheap if is("mask") => rate(0.18, 1.6),
        Work::Cheap if one_pass(op.name) => rate(0.11, 0.35),
        Work::Cheap => rate(0.19, 0.95),

        Work::Compute | Work::View | Work::Fixed | Work::Pass => rate(0.0, 0.0),
    }
}

/// Whether an operation reads one tensor and may write into it.
fn one_pass(name: &str) -> bool {
    let ends = [
        "_scalar",
        "_neg",
        "_abs",
        "_recip",
        "_sign",
        "_is_nan",
        "_elem",
        "bool_and",
        "bool_not",
        "relu",
        "hard_sigmoid",
    ];
    ends.iter().any(|end| name.ends_with(end))
}

/// Nanoseconds of a product: those of its multiplications, or, of a matrix and a vector, those of reading the matrix.
pub(super) fn product_ns(op: &str, multiplications: f64, largest: f64) -> f64 {
    let each = match op {
        _ if op.starts_with("deform") => 2.0,
        _ if op.starts_with("conv_transpose") => 0.1,
        _ if op.starts_with("conv") => 0.2,
        _ if op.starts_with("linear") => 0.075,
        _ if op.starts_with("int") => 0.17,
        _ => 0.095,
    };
    (each * multiplications).max(0.5 * largest)
}
