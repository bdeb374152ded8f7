//! DeepSpeed's JSON, the batch sizes and the estimate, by what users see of them.

mod batch;
mod deepspeed;
mod estimate;
mod faults;
mod files;
mod sections;
