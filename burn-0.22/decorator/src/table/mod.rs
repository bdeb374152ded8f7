//! The rows: those of every release by path, those of this one in `release.rs`.

#[path = "../../../../burn-decorator/src/table/activation.rs"]
mod activation;
#[path = "../../../../burn-decorator/src/table/bool.rs"]
mod bool;
#[path = "../../../../burn-decorator/src/table/float.rs"]
mod float;
#[path = "../../../../burn-decorator/src/table/int.rs"]
mod int;
#[path = "../../../../burn-decorator/src/table/module.rs"]
mod module;
#[path = "../../../../burn-decorator/src/table/quantized.rs"]
mod quantized;
mod release;
#[path = "../../../../burn-decorator/src/table/transaction.rs"]
mod transaction;

/// Hands the rows of every trait to a macro, one trait after the other; see [the crate's
/// documentation](crate).
#[macro_export]
macro_rules! every_ops {
    ($callback:ident) => {
        $crate::float_ops!($callback);
        $crate::int_ops!($callback);
        $crate::bool_ops!($callback);
        $crate::quantized_ops!($callback);
        $crate::module_ops!($callback);
        $crate::activation_ops!($callback);
        $crate::transaction_ops!($callback);
    };
}
