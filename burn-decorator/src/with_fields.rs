//! The `with_*` of a configuration, without anything of Burn's.

/// Gives a configuration a `with_*` for each field: a part of [`config!`](crate::config!), for both
/// versions of Burn.
#[doc(hidden)]
#[macro_export]
macro_rules! with_fields {
    ($config:ident { $($field:ident: $type:ty = $with:ident),* }) => {
        impl $config {
            $(
                #[doc = concat!("With another [`", stringify!($field), "`](Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $with(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}
