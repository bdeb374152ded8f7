//! Which rank trains on which items.

use core::ops::Range;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::tensor::backend::Backend;

/// Equally long parts of `items`, one a rank, in order. They overlap if the items do not divide by
/// the ranks: the first part begins with the data, the last one ends with it, and the others begin
/// evenly between.
fn parts(items: usize, ranks: usize) -> impl Iterator<Item = Range<usize>> {
    let length = items.div_ceil(ranks);
    let start = move |rank| rank * (items - length) / (ranks - 1).max(1);
    (0..ranks).map(move |rank| start(rank)..start(rank) + length)
}

/// A loader for each rank. A loader that shuffles does so within each part, as Burn's
/// `split_dataloader`.
///
/// Each process makes all parts: a shuffling loader gives each part another order, which must not
/// depend on whether ranks are threads or processes.
pub(super) fn split<B: Backend, O>(
    loader: &Arc<dyn DataLoader<B, O>>,
    ranks: usize,
) -> Vec<Arc<dyn DataLoader<B, O>>> {
    if ranks == 1 {
        return vec![loader.clone()];
    }
    let parts = parts(loader.num_items(), ranks);
    parts
        .map(|part| loader.slice(part.start, part.end))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_are_equally_long_and_cover_the_data(items in 0_usize..200, ranks in 1_usize..9) {
            let parts: Vec<_> = parts(items, ranks).collect();
            prop_assert_eq!(parts.len(), ranks);
            let mut seen = vec![0_usize; items];
            for part in parts {
                prop_assert_eq!(part.len(), items.div_ceil(ranks));
                part.for_each(|item| seen[item] += 1);
            }
            let again: usize = seen.iter().map(|times| times - 1).sum();
            prop_assert!(again < ranks);
        }
    }
}
