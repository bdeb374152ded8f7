//! TensorBoard event files of a Burn training.
//!
//! ```no_run
//! # use burn::train::logger::FileMetricLogger;
//! use burn_tensorboard::TensorBoard;
//!
//! # fn main() -> std::io::Result<()> {
//! let logger = TensorBoard::new(FileMetricLogger::new("run"), "run/tensorboard")?;
//! // SupervisedTraining::new("run", train, valid).with_metric_logger(logger)
//! # Ok(())
//! # }
//! ```
//!
//! `tensorboard --logdir run/tensorboard` draws each numeric metric of the Learner over the
//! training steps, while it trains: the runs `train`, one point a step, and `valid`, one point an
//! epoch.

mod event;
mod logger;

pub use logger::TensorBoard;
