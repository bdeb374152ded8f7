//! Operations, as the table describes them.

use std::fmt;

use parking_lot::Mutex;

use crate::record::work::{Rate, Work, ends_with};

/// An operation of Burn's backend.
#[derive(Clone, Copy)]
pub struct OpInfo {
    /// The name of the method of the backend's operation traits, such as `float_matmul`.
    pub name: &'static str,
    /// What it takes to compute its result again.
    pub work: Work,
    /// The operation trait, such as `FloatTensorOps`.
    pub group: &'static str,
    /// What an element costs, computed at compile time: comparing names takes longer than small
    /// operations do.
    pub(crate) rate: Rate,
    /// The name's hash, computed at compile time.
    pub(crate) key: u64,
    /// Whether it is not an operation but a parameter, whose path is the name.
    pub(crate) is_parameter: bool,
    /// Whether only forward passes run it, on activations and parameters.
    pub(crate) is_forward_only: bool,
    /// Whether it computes gradients.
    pub(crate) is_backward_only: bool,
    /// Whether it is a reshape.
    pub(crate) reshapes: bool,
    /// Whether it writes into its operand if it can: an assignment to a slice.
    pub(crate) writes: bool,
    /// Whether it reads rows of a table.
    pub(crate) looks_up: bool,
    /// Whether it is a view whose elements are in the order of its operand's.
    pub(crate) keeps_order: bool,
}

impl OpInfo {
    pub(crate) const fn new(name: &'static str, work: Work, group: &'static str) -> Self {
        let bytes = name.as_bytes();
        let is_backward_only = ends_with(bytes, b"_backward");
        let reshapes = ends_with(bytes, b"reshape");
        let is_of_modules = matches!(group.as_bytes(), b"ModuleOps" | b"ActivationOps");
        Self {
            name,
            work,
            group,
            rate: Rate::of(bytes, work),
            key: hash(name),
            is_parameter: false,
            is_forward_only: is_of_modules && !is_backward_only,
            is_backward_only,
            reshapes,
            writes: ends_with(bytes, b"slice_assign"),
            looks_up: matches!(bytes, b"embedding")
                || ends_with(bytes, b"_gather")
                || ends_with(bytes, b"_gather_nd")
                || ends_with(bytes, b"_select"),
            keeps_order: reshapes
                || ends_with(bytes, b"detach")
                || ends_with(bytes, b"set_require_grad"),
        }
    }

    /// Not an operation but a parameter, whose path is the name that traces show. It is never
    /// freed.
    pub(crate) fn parameter(path: &str) -> &'static Self {
        static PATHS: Mutex<Vec<&OpInfo>> = Mutex::new(Vec::new());
        let mut paths = PATHS.lock();
        if let Some(known) = paths.iter().find(|known| known.name == path) {
            return known;
        }
        let path: &str = Box::leak(path.into());
        let new = Box::leak(Box::new(Self {
            is_parameter: true,
            ..Self::new(path, Work::Fixed, "parameter")
        }));
        paths.push(new);
        new
    }

    /// An operation of your own, for [`Remat::operation`](crate::Remat::operation).
    pub const fn custom(name: &'static str, work: Work) -> Self {
        Self::new(name, work, "custom")
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

macro_rules! rows {
    ($group:ident $($cast:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        &[$(OpInfo::new(stringify!($op), Work::of(stringify!($work)), stringify!($group))),*]
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

/// Every operation of Burn's backend with its work class. The same rows make
/// [`Remat`](crate::Remat).
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A reshape and an assignment are known by the end of the name: the same word in front means
    /// nothing.
    #[test]
    fn a_name_says_what_it_ends_with() {
        let reshape = OpInfo::custom("patches_reshape", Work::View);
        assert!(reshape.reshapes && reshape.keeps_order && !reshape.writes);
        let other = OpInfo::custom("reshape_transposed", Work::View);
        assert!(!other.reshapes && !other.keeps_order);
        assert!(!OpInfo::custom("slice_assign_rows", Work::Cheap).writes);
    }
}
