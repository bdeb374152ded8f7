//! Configurations in Burn's idiom.

/// Gives a configuration what `#[derive(Config)]` gives Burn's: a `with_*` for each field, and
/// `burn::config::Config`, which saves and loads it. The derive cannot be used where a file may leave
/// fields out and must not misspell them, which serde's own attributes say.
///
/// ```text
/// #[derive(Clone, Debug, Serialize, Deserialize)]
/// #[serde(default, deny_unknown_fields)]
/// pub struct WindowConfig {
///     pub steps: usize,
/// }
///
/// burn_decorator::config!(WindowConfig {
///     steps: usize = with_steps,
/// });
/// ```
#[macro_export]
macro_rules! config {
    ($config:ident { $($field:ident: $type:ty = $with:ident),* $(,)? }) => {
        impl burn::config::Config for $config {}

        $crate::with_fields!($config { $($field: $type = $with),* });
    };
}
