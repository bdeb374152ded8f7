//! Work classes of operations, and the time that their elements take:
//! `cargo bench --workspace --bench calibrate` prints measured times on Flex, on one thread, beside
//! these.

/// What it takes to compute an operation's result again: the work class of its row in
/// `burn-decorator`'s table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// A product: matmul, convolution, attention. Its cost grows faster than its bytes.
    Compute,
    /// Sorting, a Fourier transform, dynamic programming.
    Sort,
    /// Several passes with exponentials or roots: softmax, layer norm.
    Norm,
    /// A transcendental function of each element.
    Math,
    /// A pass over the input: sums, extrema, scans.
    Reduce,
    /// Moving elements by index or by windows: gather, embedding, pooling.
    Index,
    /// A few instructions an element: arithmetic, comparisons, casts, copies.
    Cheap,
    /// None, or a copy: the result may share the operand's storage.
    View,
    /// A function of plain arguments: zeros, ones, full, arange.
    New,
    /// Cannot be done again: random numbers, data from the host, uninitialised tensors, shapes that
    /// depend on data.
    Fixed,
    /// No tensor results: queries, and reads to the host.
    Pass,
}

/// Nanoseconds to start any operation.
pub(crate) const START_NS: f64 = 300.0;

/// Elements that a core's cache holds.
const CACHED: f64 = 262_144.0;

/// Nanoseconds an element, of those that fit the cache and of those beyond.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    cached_ns: f64,
    beyond_ns: f64,
}

/// A row of the table below.
const fn rate(cached_ns: f64, beyond_ns: f64) -> Rate {
    Rate {
        cached_ns,
        beyond_ns,
    }
}

impl Work {
    /// The class that a row of the table names.
    pub(crate) const fn of(name: &str) -> Self {
        match name.as_bytes() {
            b"compute" => Self::Compute,
            b"sort" => Self::Sort,
            b"norm" => Self::Norm,
            b"math" => Self::Math,
            b"reduce" => Self::Reduce,
            b"index" => Self::Index,
            b"cheap" => Self::Cheap,
            b"view" => Self::View,
            b"new" => Self::New,
            b"fixed" => Self::Fixed,
            b"pass" => Self::Pass,
            _ => panic!("not a work class"),
        }
    }

    /// Whether a result computed from [delivered](crate::delivered()) tensors alone is delivered
    /// itself: one that is as large as they are and quick to compute.
    pub(crate) const fn passes_delivery(self) -> bool {
        matches!(
            self,
            Self::View | Self::Cheap | Self::Math | Self::Norm | Self::Index
        )
    }
}

impl Rate {
    /// Nanoseconds of so many elements.
    pub fn ns(self, elements: f64) -> f64 {
        let cached = elements.min(CACHED);
        self.cached_ns * cached + self.beyond_ns * (elements - cached)
    }

    /// The rate of an operation that is not a product. Operations of a class differ less than the
    /// classes do, with a few exceptions.
    pub const fn of(name: &[u8], work: Work) -> Self {
        match work {
            Work::Sort if has(name, b"fft") => rate(6.5, 10.0),
            Work::Sort if has(name, b"arg") => rate(36.0, 56.0),
            Work::Sort => rate(23.0, 32.0),

            Work::Norm if has(name, b"layer_norm") => rate(0.6, 2.6),
            Work::Norm => rate(3.5, 7.0),

            Work::Math if has(name, b"powi") => rate(0.11, 0.9),
            Work::Math if any(name, &["tanh", "log1p", "atan"]) => rate(10.0, 11.0),
            Work::Math if any(name, &["remainder", "log_sigmoid"]) => rate(11.0, 13.0),
            Work::Math => rate(4.3, 5.5),

            Work::Reduce if has(name, b"prod") => rate(3.0, 1.7),
            Work::Reduce if any(name, &["max_dim", "min_dim", "arg"]) => rate(1.4, 2.2),
            Work::Reduce if has(name, b"cum") => rate(0.6, 2.0),
            Work::Reduce if has(name, b"int_") => rate(0.75, 2.3),
            Work::Reduce => rate(0.11, 0.22),

            Work::Index if any(name, &["gather", "scatter"]) => rate(1.7, 10.0),
            Work::Index if any(name, &["select", "embedding"]) => rate(0.16, 1.3),
            Work::Index if has(name, b"adaptive") => rate(1.8, 2.2),
            Work::Index if has(name, b"max_pool") => rate(22.0, 25.0),
            Work::Index if has(name, b"pool") => rate(7.0, 7.3),
            Work::Index if has(name, b"interpolate") => rate(12.0, 13.0),
            Work::Index => rate(19.0, 20.0),

            Work::Cheap if any(name, &["round", "floor", "ceil", "trunc"]) => rate(2.0, 2.3),
            Work::Cheap if has(name, b"cast") => rate(1.2, 6.0),
            Work::Cheap if any(name, &["sqrt", "into_int"]) => rate(0.85, 1.0),
            Work::Cheap if has(name, b"clamp") => rate(0.55, 0.7),
            Work::Cheap if any(name, &["repeat", "assign"]) => rate(0.2, 3.4),
            Work::Cheap if has(name, b"mask") => rate(0.18, 1.6),
            Work::Cheap if any(name, ONE_PASS) => rate(0.11, 0.35),
            Work::Cheap => rate(0.19, 0.95),

            Work::New => rate(0.11, 0.35),

            // Only a view that has to copy costs this: it reads in another order than it writes.
            Work::View => rate(0.3, 1.2),

            Work::Compute | Work::Fixed | Work::Pass => rate(0.0, 0.0),
        }
    }
}

/// Parts of the names of operations that read one tensor and may write into it.
const ONE_PASS: &[&str] = &[
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

/// Whether a name has any of these parts, at compile time.
const fn any(name: &[u8], parts: &[&str]) -> bool {
    matches!(parts, [part, rest @ ..] if has(name, part.as_bytes()) || any(name, rest))
}

/// Whether a name has this part, at compile time.
const fn has(mut name: &[u8], part: &[u8]) -> bool {
    while !ends_with(name, part) {
        let [start @ .., _] = name else { return false };
        name = start;
    }
    true
}

/// Whether a name ends with this part, at compile time.
pub(crate) const fn ends_with(name: &[u8], part: &[u8]) -> bool {
    match (name, part) {
        (_, []) => true,
        ([name @ .., a], [part @ .., b]) => *a == *b && ends_with(name, part),
        _ => false,
    }
}

/// Nanoseconds of a product: those of its multiplications, or, of a matrix and a vector, those of
/// reading the matrix.
pub(crate) fn product_ns(op: &str, multiplications: f64, largest: f64) -> f64 {
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
