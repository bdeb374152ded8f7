//! What ranks send and hold: expected before training, and found after it.

use std::fmt;

use burn_zero::group::Operation;
use burn_zero::{Estimate, ModelStates, ResolvedConfig, estimate};
use serde::{Deserialize, Serialize};

use super::Rank;
use crate::gpt::error::GptError;
use crate::gpt::optimizer::state_bytes;
use crate::gpt::placement::Held;

/// What one rank has sent and held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFigures {
    /// Steps of its optimizer.
    pub updates: u64,
    /// Elements of gradients and parameters that it sent to other ranks.
    pub sent_elements: u64,
    /// All bytes that it sent to other ranks.
    pub sent_bytes: u64,
    /// Elements that its optimizer updates.
    pub updated_elements: u64,
    /// Bytes of their optimizer state, and of the parameters that are kept beside it on the host.
    pub state_bytes: u64,
}

/// What is expected of a rank, before training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Expected(pub Estimate);

impl Expected {
    /// Of a model with so many parameters.
    pub fn of(parameters: usize, job: &ResolvedConfig) -> Self {
        let model = ModelStates {
            optimizer_bytes: job.config.optimizer.as_ref().map_or(0, state_bytes),
            ..ModelStates::adam(parameters as u64)
        };
        Self(estimate(&model, &job.config, job.batch.world_size))
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mebibytes = |bytes: u64| format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20));
        let Estimate {
            parameter_bytes,
            gradient_bytes,
            optimizer_bytes,
            host_bytes,
            host_gradient_bytes,
            sent_elements,
            ..
        } = self.0;
        write!(
            f,
            "a rank holds {} of parameters, {} of gradients ({} on the host), {} of optimizer state ({} on the host), activations apart, \
             and sends {sent_elements} elements an update",
            mebibytes(parameter_bytes),
            mebibytes(gradient_bytes),
            mebibytes(host_gradient_bytes),
            mebibytes(optimizer_bytes),
            mebibytes(host_bytes),
        )
    }
}

impl Rank {
    /// What all ranks have sent and held.
    ///
    /// # Errors
    ///
    /// [`GptError::Ranks`].
    pub fn figures(&self, held: &Held, job: &ResolvedConfig) -> Result<Vec<RankFigures>, GptError> {
        let traffic = self.0.traffic();
        let sent = [
            Operation::AllReduce,
            Operation::ReduceScatter,
            Operation::AllGather,
        ];
        let per_element = job.config.optimizer.as_ref().map_or(0, state_bytes);
        // On the host there are f32 parameters beside it.
        let on_host = held.elements() as f64 * job.config.offload_optimizer.ratio();
        let own = RankFigures {
            updates: held.updates(),
            sent_elements: sent
                .map(|operation| traffic.of(operation).elements)
                .iter()
                .sum(),
            sent_bytes: traffic.total().data_bytes + traffic.total().header_bytes,
            updated_elements: held.elements(),
            state_bytes: held.elements() * per_element + 4 * on_host.round() as u64,
        };
        let bytes = serde_json::to_vec(&own).expect("numbers are plain data");
        let all = self.0.gather_bytes("figures of the ranks", bytes)?;
        let read = |bytes: &Vec<u8>| serde_json::from_slice(bytes).expect("a rank wrote it");
        Ok(all.iter().map(read).collect())
    }
}
