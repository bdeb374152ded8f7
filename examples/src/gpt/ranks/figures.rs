//! The bytes that ranks send and hold: expected before training, and measured after it.

use std::fmt;

use burn_zero::group::Operation;
use burn_zero::{Estimate, ModelStates, estimate};
use serde::{Deserialize, Serialize};

use super::Rank;
use crate::gpt::error::GptError;
use crate::gpt::held::Held;
use crate::gpt::job::Job;
use crate::gpt::optimizer::state_bytes;

/// What one rank has sent and held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFigures {
    /// Steps of its optimizer.
    pub updates: u64,
    /// Elements of gradients and parameters that it sent to other ranks.
    pub sent_elements: u64,
    /// The same in bytes.
    pub sent_data_bytes: u64,
    /// All bytes that it sent to other ranks: records, agreements and the headers of messages, too.
    pub sent_bytes: u64,
    /// Elements that its optimizer updates.
    pub updated_elements: u64,
    /// Bytes of its optimizer's state, and of the parameters that are kept beside it on the host: measured after its first step.
    pub state_bytes: u64,
    /// The most bytes of gradients that it held at once, measured; sums of a window of micro-batches are not among them.
    pub gradient_bytes: u64,
}

/// What is expected of a rank, before training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected(pub Estimate);

impl Expected {
    /// Of a model under the job's optimizer.
    pub fn of(model: ModelStates, job: &Job) -> Self {
        let model = ModelStates {
            optimizer_bytes: job.config.optimizer.as_ref().map_or(0, state_bytes),
            ..model
        };
        let mut config = job.config.zero.clone();
        // The file may leave it to the two batch sizes.
        config.batch.gradient_accumulation_steps = Some(job.batch.steps);
        Self(estimate(&model, &config, job.batch.world_size))
    }

    /// Gradients at their peak, in both memories, without the sums of a window: all gradients at most, and the largest one once more
    /// if it spans several buckets.
    pub fn gradient_bytes(&self) -> u64 {
        let Estimate {
            gradient_bytes,
            host_gradient_bytes,
            underway_bytes,
            spanning_bytes,
            parameter_bytes,
            ..
        } = self.0;
        let held = gradient_bytes + host_gradient_bytes + underway_bytes;
        held.min(parameter_bytes) + spanning_bytes
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mebibytes = |bytes: u64| format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20));
        let Estimate {
            parameter_bytes,
            optimizer_bytes,
            host_bytes,
            host_gradient_bytes,
            sent_elements,
            sent_bytes,
            ..
        } = self.0;
        write!(
            f,
            "a rank holds {} of parameters, at most {} of gradients ({} on the host), {} of optimizer state on the device and {} on the \
             host, activations apart, and sends {sent_elements} elements, {}, an update",
            mebibytes(parameter_bytes),
            mebibytes(self.gradient_bytes()),
            mebibytes(host_gradient_bytes),
            mebibytes(optimizer_bytes),
            mebibytes(host_bytes),
            mebibytes(sent_bytes),
        )
    }
}

impl Rank {
    /// What all ranks have sent and held.
    ///
    /// # Errors
    ///
    /// [`GptError::Ranks`].
    pub fn figures(&self, held: &Held) -> Result<Vec<RankFigures>, GptError> {
        let traffic = self.0.traffic();
        let operations = [
            Operation::AllReduce,
            Operation::ReduceScatter,
            Operation::AllGather,
        ];
        let sent = operations.map(|operation| traffic.of(operation));
        let own = RankFigures {
            updates: held.updates(),
            sent_elements: sent.iter().map(|sent| sent.elements).sum(),
            sent_data_bytes: sent.iter().map(|sent| sent.data_bytes).sum(),
            sent_bytes: traffic.total().data_bytes + traffic.total().header_bytes,
            updated_elements: held.elements(),
            state_bytes: held.state_bytes(),
            gradient_bytes: held.gradient_bytes(),
        };
        let bytes = serde_json::to_vec(&own).expect("numbers are plain data");
        let all = self.0.gather_bytes("figures of the ranks", bytes)?;
        let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).expect("a rank wrote it");
        Ok(all.iter().map(read).collect())
    }
}
