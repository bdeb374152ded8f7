//! The table of operations as data.

use std::sync::LazyLock;

use crate::cast::Cast;

/// One operation of Burn's backend and what autocast does to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpRow {
    /// The name of the method of the backend's operation traits, such as `float_matmul`.
    pub op: &'static str,
    /// The cast class; of no effect where `float_operands` is false.
    pub cast: Cast,
    /// The reason for the class, empty where it is obvious.
    pub reason: &'static str,
    /// The operation trait, such as `FloatTensorOps`.
    pub group: &'static str,
    /// Whether any operand is a float tensor.
    pub float_operands: bool,
}

impl OpRow {
    /// The name without the `float_` that methods of `FloatTensorOps` start with: `matmul`,
    /// `sum_dim`.
    pub fn short_name(&self) -> &'static str {
        self.op.strip_prefix("float_").unwrap_or(self.op)
    }
}

/// Whether an operand of this kind may be a float tensor.
const fn is_float(kind: &str) -> bool {
    matches!(
        kind.as_bytes(),
        b"Float" | b"FloatOpt" | b"Floats" | b"Follow" | b"Tensor"
    )
}

macro_rules! rows {
    ($group:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        &[$(OpRow {
            op: stringify!($op),
            cast: Cast::of(stringify!($class)),
            reason: concat!($($why)?),
            group: stringify!($group),
            float_operands: false $(|| is_float(stringify!($kind)))*,
        }),*]
    };
}

const FLOAT: &[OpRow] = burn_decorator::float_ops!(rows);
const INT: &[OpRow] = burn_decorator::int_ops!(rows);
const BOOL: &[OpRow] = burn_decorator::bool_ops!(rows);
const QUANTIZED: &[OpRow] = burn_decorator::quantized_ops!(rows);
const MODULE: &[OpRow] = burn_decorator::module_ops!(rows);
const ACTIVATION: &[OpRow] = burn_decorator::activation_ops!(rows);
const TRANSACTION: &[OpRow] = burn_decorator::transaction_ops!(rows);

static TABLE: LazyLock<Vec<OpRow>> =
    LazyLock::new(|| [FLOAT, MODULE, ACTIVATION, INT, BOOL, QUANTIZED, TRANSACTION].concat());

/// Every operation of Burn's backend with its cast class.
///
/// The same rows make the decorator, so what is printed here is what runs. `docs/operations.md` is
/// printed from it.
///
/// ```
/// let row = burn_amp::op_table().iter().find(|row| row.op == "softmax").unwrap();
/// assert_eq!(row.cast, burn_amp::Cast::Full);
/// ```
pub fn op_table() -> &'static [OpRow] {
    &TABLE
}

/// Operations that take float tensors but do not compute: a cast there would only change what the
/// user asked for.
const STRUCTURAL: [&str; 5] = [
    "float_cast",
    "float_detach",
    "float_set_require_grad",
    "float_into_data",
    "float_to_device",
];

/// The rows of operations that compute with float tensors: a configuration can give them another
/// class.
pub(crate) fn castable_rows() -> impl Iterator<Item = &'static OpRow> {
    op_table()
        .iter()
        .filter(|row| row.float_operands && !STRUCTURAL.contains(&row.op))
}

/// The row of an operation that computes with float tensors, by its full or its short name.
pub(crate) fn castable(name: &str) -> Option<&'static OpRow> {
    castable_rows().find(|row| row.op == name || row.short_name() == name)
}
