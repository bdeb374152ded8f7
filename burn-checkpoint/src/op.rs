//! Operations, as the table describes them.

use std::fmt;

use crate::budget::Rate;

/// What it takes to have an operation's result once more: the work class of its row in `burn-decorator`'s table.
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
    /// Cannot be done again: random numbers, data from the host, new tensors, shapes that depend on data.
    Fixed,
    /// No tensor results: what asks, or reads to the host.
    Pass,
}

/// An operation of Burn's backend.
#[derive(Clone, Copy)]
pub struct OpInfo {
    /// The name of the method of the backend's operation traits, such as `float_matmul`.
    pub name: &'static str,
    /// What it takes to have its result once more.
    pub work: Work,
    /// The operation trait, such as `FloatTensorOps`.
    pub group: &'static str,
    /// What an element costs, found when this is compiled: looking at names takes longer than small operations do.
    pub(crate) rate: Rate,
    /// The name's hash, found when this is compiled.
    pub(crate) key: u64,
}

impl OpInfo {
    pub(crate) const fn new(name: &'static str, work: Work, group: &'static str) -> Self {
        Self {
            name,
            work,
            group,
            rate: Rate::of(name, work),
            key: hash(name),
        }
    }
}

/// FNV-1a.
const fn hash(name: &str) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let mut at = 0;
    while at < name.len() {
        hash = (hash ^ name.as_bytes()[at] as u64).wrapping_mul(0x100_0000_01b3);
        at += 1;
    }
    hash
}

impl PartialEq for OpInfo {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for OpInfo {}

impl fmt::Debug for OpInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({:?})", self.name, self.work)
    }
}

macro_rules! work {
    (compute) => {
        $crate::op::Work::Compute
    };
    (sort) => {
        $crate::op::Work::Sort
    };
    (norm) => {
        $crate::op::Work::Norm
    };
    (math) => {
        $crate::op::Work::Math
    };
    (reduce) => {
        $crate::op::Work::Reduce
    };
    (index) => {
        $crate::op::Work::Index
    };
    (cheap) => {
        $crate::op::Work::Cheap
    };
    (view) => {
        $crate::op::Work::View
    };
    (fixed) => {
        $crate::op::Work::Fixed
    };
    (pass) => {
        $crate::op::Work::Pass
    };
}
pub(crate) use work;

macro_rules! rows {
    ($group:ident $($cast:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        &[$(OpInfo::new(stringify!($op), work!($work), stringify!($group))),*]
    };
}

const TABLE: [&[OpInfo]; 7] = [
    burn_decorator::float_ops!(rows),
    burn_decorator::module_ops!(rows),
    burn_decorator::activation_ops!(rows),
    burn_decorator::int_ops!(rows),
    burn_decorator::bool_ops!(rows),
    burn_decorator::quantized_ops!(rows),
    burn_decorator::transaction_ops!(rows),
];

/// Every operation of Burn's backend with its work class. The same rows make [`Remat`](crate::Remat).
///
/// ```
/// use burn_checkpoint::{Work, op_table};
///
/// let matmul = op_table().find(|op| op.name == "float_matmul").unwrap();
/// assert_eq!(matmul.work, Work::Compute);
/// ```
pub fn op_table() -> impl Iterator<Item = &'static OpInfo> {
    TABLE.into_iter().flatten()
}
