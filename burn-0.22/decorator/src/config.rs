//! Configurations, without Burn's `Config`: burn-amp is over burn-backend alone here.

/// Gives a configuration a `with_*` for each field.
#[macro_export]
macro_rules! config {
    ($config:ident { $($field:ident: $type:ty = $with:ident),* $(,)? }) => {
        $crate::with_fields!($config { $($field: $type = $with),* });
    };
}
