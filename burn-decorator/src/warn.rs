//! Warnings that a user must see, also one whose program has no logger.
//!
//! The `log` crate drops every message until a program installs a logger, and most training
//! programs install none. So [`warn_user!`](crate::warn_user) writes to the log where there is one,
//! each time, and otherwise to standard error, each message once in the process.

use core::fmt;
use std::sync::Once;

use log::{Level, LevelFilter, Metadata};

/// Whether warnings of `target` are for the log: a logger is installed, even one that is turned
/// off.
///
/// `log` does not tell whether a logger is installed. Until then the level is [`LevelFilter::Off`],
/// and its own logger, which has no size, refuses everything. A logger that a user turned off
/// (`RUST_LOG=off`) has a size, and is left in peace.
pub fn has_logger(target: &str) -> bool {
    let logger = log::logger();
    let warning = Metadata::builder()
        .target(target)
        .level(Level::Warn)
        .build();
    log::max_level() != LevelFilter::Off || size_of_val(logger) > 0 || logger.enabled(&warning)
}

/// Writes a warning: to the log, or, without a logger, to standard error if `shown` was not used
/// before. For [`warn_user!`](crate::warn_user), which has one `shown` for each message.
pub fn warn(shown: &Once, target: &str, message: fmt::Arguments<'_>) {
    if has_logger(target) {
        log::warn!(target: target, "{message}");
    } else {
        shown.call_once(|| eprintln!("warning: {message}"));
    }
}

/// Warns the user, with the arguments of `format!`: in the log, or, where the program has no
/// logger, once on standard error.
///
/// ```
/// burn_decorator::warn_user!("a budget of {} bytes is too small", 7);
/// ```
#[macro_export]
macro_rules! warn_user {
    ($($message:tt)+) => {{
        static SHOWN: ::std::sync::Once = ::std::sync::Once::new();
        $crate::warn::warn(&SHOWN, ::core::module_path!(), ::core::format_args!($($message)+));
    }};
}
