//! Configurations, without Burn's `Config`: burn-amp is over burn-backend alone here.

/// Gives a configuration a `with_*` for each field.
#[macro_export]
macro_rules! config {
    ($config:ident { $($field:ident: $type:ty = $with:ident),* $(,)? }) => {
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
