//! The estimates of all stages side by side.

use std::fmt;

use super::{Estimate, ModelStates, estimate};
use crate::{Stage, ZeroConfig};

/// Estimates for 1 to 8 ranks at every stage, all else as configured, to choose from before a job is written: its display is a table.
///
/// ```
/// use burn_zero::{EstimateTable, ModelStates, ZeroConfig};
///
/// let table = EstimateTable::new(&ModelStates::adam(124_000_000), &ZeroConfig::default());
/// assert_eq!(table.to_string().lines().nth(2), Some("    1    1.85 GiB    1.85 GiB    1.85 GiB           0 B"));
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct EstimateTable {
    model: ModelStates,
    /// Ranks, and the estimate of each stage.
    rows: Vec<(usize, [Estimate; 3])>,
}

impl EstimateTable {
    /// The table of a model.
    pub fn new(model: &ModelStates, config: &ZeroConfig) -> Self {
        let at = |stage, ranks| {
            estimate(
                model,
                &ZeroConfig {
                    stage,
                    ..config.clone()
                },
                ranks,
            )
        };
        let rows = (1..=8).map(|ranks| (ranks, Stage::ALL.map(|stage| at(stage, ranks))));
        Self {
            model: *model,
            rows: rows.collect(),
        }
    }

    /// Ranks, and the estimates of stages 0, 1 and 2.
    pub fn rows(&self) -> &[(usize, [Estimate; 3])] {
        &self.rows
    }
}

impl fmt::Display for EstimateTable {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let elements = self.model.elements;
        writeln!(
            formatter,
            "{elements} elements; memory of a device at the highest, activations apart:"
        )?;
        writeln!(
            formatter,
            "ranks     stage 0     stage 1     stage 2  sent an update (stage 2)"
        )?;
        for (ranks, estimates) in &self.rows {
            write!(formatter, "{ranks:5}")?;
            for estimate in estimates {
                write!(formatter, "{:>12}", in_units(estimate.peak_device_bytes()))?;
            }
            writeln!(formatter, "{:>14}", in_units(estimates[2].sent_bytes))?;
        }
        if let Some((_, [_, _, sharded])) = self.rows.first()
            && sharded.host_bytes > 0
        {
            writeln!(
                formatter,
                "and {} / ranks of host memory",
                in_units(sharded.kept_host_bytes())
            )?;
        }
        Ok(())
    }
}

fn in_units(bytes: u64) -> String {
    let bytes = bytes as f64;
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let fitting = units
        .into_iter()
        .find(|(_, power)| bytes >= 2f64.powi(*power));
    match fitting {
        Some((unit, power)) => format!("{:.2} {unit}", bytes / 2f64.powi(power)),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OptimizerOffload;

    #[test]
    fn every_world_size_has_a_row() {
        let table = EstimateTable::new(&ModelStates::adam(1 << 20), &ZeroConfig::default());
        assert_eq!(table.rows().len(), 8);
        let text = table.to_string();
        assert_eq!(text.lines().count(), 10);
        // 4 + 12/4 bytes; one bucket has all gradients until it is reduced, 1 - 1/4 of them beyond the shard.
        let four: Vec<&str> = text.lines().nth(5).unwrap().split_whitespace().collect();
        assert_eq!(
            four,
            [
                "4", "16.00", "MiB", "10.00", "MiB", "10.00", "MiB", "6.00", "MiB"
            ]
        );
    }

    #[test]
    fn host_memory_is_named() {
        let offload_optimizer = OptimizerOffload::Host { ratio: 1.0 };
        let config = ZeroConfig {
            offload_optimizer,
            ..Default::default()
        };
        let table = EstimateTable::new(&ModelStates::adam(1 << 20), &config);
        assert!(
            table
                .to_string()
                .ends_with("and 16.00 MiB / ranks of host memory\n")
        );
    }
}
