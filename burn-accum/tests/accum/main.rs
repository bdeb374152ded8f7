//! What gradient accumulation promises, on Flex.

mod clip;
mod composition;
mod config;
mod late;
mod laws;
mod learner;
mod properties;
mod records;
mod schedulers;
mod support;
mod tokens;
mod window;
