//! DeepSpeed's JSON, the batch sizes and the estimate, by what users see of them.

mod batch;
mod deepspeed;
mod estimate;
mod faults;
mod files;
mod sections;

use burn_zero::{ConfigFault, ZeroError};

/// What is wrong with a configuration.
#[track_caller]
fn fault(error: ZeroError) -> ConfigFault {
    match error {
        ZeroError::Config(fault) => fault,
        other => panic!("not of a configuration: {other:?}"),
    }
}
