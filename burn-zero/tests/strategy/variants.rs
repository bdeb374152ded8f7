//! The model with more in it.

use burn::nn::DropoutConfig;
use burn::tensor::backend::Backend;

use crate::model::Model;

impl<B: Backend> Model<B> {
    /// Drops hidden features with this probability.
    pub fn dropping(mut self, probability: f64) -> Self {
        self.dropout = DropoutConfig::new(probability).init();
        self
    }

    /// Uses the first layer's weight twice, from one path.
    pub fn reusing(mut self) -> Self {
        self.reuses = true;
        self
    }

    /// The same, with that weight at a second path.
    pub fn tied(mut self) -> Self {
        self.again = Some(self.first.weight.clone());
        self.reusing()
    }
}
