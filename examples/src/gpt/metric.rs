//! Perplexity from the loss.

use std::sync::Arc;

use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

/// A mean negative log-likelihood, in nats a byte.
#[derive(Clone, Copy, Debug)]
pub struct Nats(pub f64);

/// The exponential of the mean loss.
///
/// Burn's own `PerplexityMetric` computes it from the logits, which would have to come to the host every step.
#[derive(Clone, Debug, Default)]
pub struct Perplexity {
    sum: f64,
    batches: usize,
    last: f64,
}

impl Metric for Perplexity {
    type Input = Nats;

    fn name(&self) -> MetricName {
        Arc::new("Perplexity".into())
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: None,
            higher_is_better: false,
        }
        .into()
    }

    fn update(&mut self, nats: &Nats, _: &MetricMetadata) -> SerializedEntry {
        self.sum += nats.0;
        self.batches += 1;
        self.last = nats.0;
        let [epoch, batch] = [self.running_value().current(), self.value().current()];
        SerializedEntry::new(
            format!("epoch {epoch:.2} - batch {batch:.2}"),
            self.value().serialize(),
        )
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

impl Numeric for Perplexity {
    fn value(&self) -> NumericEntry {
        NumericEntry::Value(self.last.exp())
    }

    fn running_value(&self) -> NumericEntry {
        NumericEntry::Aggregated {
            aggregated_value: (self.sum / self.batches as f64).exp(),
            count: self.batches,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::data::dataloader::Progress;

    #[test]
    fn perplexity_is_of_the_mean_loss() {
        let metadata = MetricMetadata {
            progress: Progress::new(1, 1),
            global_progress: Progress::new(1, 1),
            iteration: None,
            lr: None,
        };
        let mut metric = Perplexity::default();
        metric.update(&Nats(1.0), &metadata);
        let entry = metric.update(&Nats(3.0), &metadata);
        assert_eq!(metric.value().current(), 3f64.exp());
        assert_eq!(metric.running_value().current(), 2f64.exp());
        assert_eq!(entry.formatted, "epoch 7.39 - batch 20.09");
        metric.clear();
        metric.update(&Nats(0.0), &metadata);
        assert_eq!(metric.running_value().current(), 1.0);
    }
}
