//! The rows, one file a trait; what only one release of Burn has is in `release.rs`.

mod activation;
mod bool;
mod float;
mod int;
mod module;
mod quantized;
mod release;
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
