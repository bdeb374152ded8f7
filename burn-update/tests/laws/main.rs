//! What an update promises, on Flex, in f32 and under autocast to f16.

mod average;
mod groups;
mod learner;
mod parts;
mod records;
mod scale;
mod support;
mod windows;
