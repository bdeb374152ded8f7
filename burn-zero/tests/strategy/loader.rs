//! Rows as they are, in a loader of Burn's.

use std::sync::Arc;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::tensor::{Device, backend::Backend};

use crate::model::Row;

pub struct AsTheyAre;

impl<B: Backend> Batcher<B, Row, Vec<Row>> for AsTheyAre {
    fn batch(&self, rows: Vec<Row>, _: &Device<B>) -> Vec<Row> {
        rows
    }
}

pub fn loader<B: Backend>(rows: Vec<Row>, batch_size: usize) -> Arc<dyn DataLoader<B, Vec<Row>>> {
    let builder = DataLoaderBuilder::new(AsTheyAre).batch_size(batch_size);
    builder.build(InMemDataset::new(rows))
}
