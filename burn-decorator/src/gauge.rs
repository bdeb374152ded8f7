//! A number that is read after each batch, as a metric of Burn's Learner. With the feature `train`.

use std::sync::Arc;

use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

/// A metric whose value is what a function returns after each batch. The renderer shows the last
/// one; an epoch's value is Burn's mean over the batches at which there was one: NaN counts as
/// none.
///
/// ```
/// use burn::train::metric::Numeric;
/// use burn_decorator::gauge::Gauge;
///
/// let updates = Gauge::new("Updates", "Optimizer updates", 0.0, || 3.0).unit("updates").rising();
/// assert_eq!(updates.value().current(), 0.0); // until the first batch
///
/// let norm = Gauge::new("Norm", "None before the first update", f64::NAN, || 3.0);
/// assert_eq!(norm.value().serialize(), "0,0"); // the mean of no values
/// ```
#[derive(Clone)]
pub struct Gauge {
    name: MetricName,
    description: &'static str,
    unit: Option<&'static str>,
    higher_is_better: bool,
    format: Arc<dyn Fn(f64) -> String + Send + Sync>,
    read: Arc<dyn Fn() -> f64 + Send + Sync>,
    value: f64,
}

impl Gauge {
    /// A metric with this name and description. Its value is `first` until the first batch, then
    /// what `read` returns.
    pub fn new(
        name: &str,
        description: &'static str,
        first: f64,
        read: impl Fn() -> f64 + Send + Sync + 'static,
    ) -> Self {
        Self {
            name: Arc::new(name.to_owned()),
            description,
            unit: None,
            higher_is_better: false,
            format: Arc::new(|value: f64| value.to_string()),
            read: Arc::new(read),
            value: first,
        }
    }

    /// Names the unit of the value.
    pub fn unit(self, unit: &'static str) -> Self {
        Self {
            unit: Some(unit),
            ..self
        }
    }

    /// A higher value is better; by default a lower one is.
    pub fn rising(self) -> Self {
        Self {
            higher_is_better: true,
            ..self
        }
    }

    /// Shows the value as `format` writes it; by default with all of its digits.
    pub fn format(self, format: impl Fn(f64) -> String + Send + Sync + 'static) -> Self {
        let format = Arc::new(format);
        Self { format, ..self }
    }

    /// The value as of now.
    pub fn read(&self) -> f64 {
        (self.read)()
    }
}

impl std::fmt::Debug for Gauge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gauge")
            .field("name", &self.name)
            .field("value", &self.value)
            .finish_non_exhaustive()
    }
}

impl Metric for Gauge {
    type Input = ();

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn description(&self) -> Option<String> {
        Some(self.description.to_owned())
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: self.unit.map(str::to_owned),
            higher_is_better: self.higher_is_better,
        }
        .into()
    }

    fn update(&mut self, _item: &(), _metadata: &MetricMetadata) -> SerializedEntry {
        self.value = self.read();
        SerializedEntry::new((self.format)(self.value), self.value().serialize())
    }

    /// Nothing is accumulated over an epoch.
    fn clear(&mut self) {}
}

impl Numeric for Gauge {
    fn value(&self) -> NumericEntry {
        if self.value.is_nan() {
            let (aggregated_value, count) = (0.0, 0);
            return NumericEntry::Aggregated {
                aggregated_value,
                count,
            };
        }
        NumericEntry::Value(self.value)
    }

    fn running_value(&self) -> NumericEntry {
        self.value()
    }
}

/// Makes a struct `struct Name(Gauge)` a metric: it forwards to its [`Gauge`](crate::gauge::Gauge).
#[macro_export]
macro_rules! gauge_metric {
    ($name:ident) => {
        impl ::burn::train::metric::Metric for $name {
            type Input = ();

            fn name(&self) -> ::burn::train::metric::MetricName {
                self.0.name()
            }

            fn description(&self) -> Option<String> {
                self.0.description()
            }

            fn attributes(&self) -> ::burn::train::metric::MetricAttributes {
                self.0.attributes()
            }

            fn update(
                &mut self,
                item: &(),
                metadata: &::burn::train::metric::MetricMetadata,
            ) -> ::burn::train::metric::SerializedEntry {
                self.0.update(item, metadata)
            }

            fn clear(&mut self) {}
        }

        impl ::burn::train::metric::Numeric for $name {
            fn value(&self) -> ::burn::train::metric::NumericEntry {
                self.0.value()
            }

            fn running_value(&self) -> ::burn::train::metric::NumericEntry {
                self.0.running_value()
            }
        }
    };
}
