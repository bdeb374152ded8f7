//! The numbers of rows as a data set of Burn's `Learner`.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::tensor::Device;
use burn::tensor::backend::Backend;

struct Rows;

impl<B: Backend> Batcher<B, usize, Vec<usize>> for Rows {
    fn batch(&self, rows: Vec<usize>, _: &Device<B>) -> Vec<usize> {
        rows
    }
}

/// Loads so many rows in order, `micro_batch` at a time.
pub fn loader<B: Backend>(rows: usize, micro_batch: usize) -> Arc<dyn DataLoader<B, Vec<usize>>> {
    DataLoaderBuilder::new(Rows)
        .batch_size(micro_batch)
        .build(InMemDataset::new((0..rows).collect()))
}
