//! Which rank trains on which items.

use core::ops::Range;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::tensor::backend::Backend;
use serde::{Deserialize, Serialize};

use crate::ZeroError;

/// What the loaders of a process hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loaders {
    /// All of the data, which the strategy cuts into one part a rank. The default.
    #[default]
    Whole,
    /// This rank's part of the training data, as with PyTorch's `DistributedSampler`, and all of the validation data.
    TrainSplit,
    /// This rank's part of the training data and of the validation data.
    Split,
}

/// What happens to training data that does not divide by the number of ranks. Every rank must take equally many steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Uneven {
    /// Parts overlap: fewer items than there are ranks are trained on twice an epoch (PyTorch's `DistributedSampler`). The
    /// default. A process that loaded its own part repeats it until the longest part is at its end.
    #[default]
    Repeat,
    /// Fewer items than there are ranks, always the last ones, are left out (`drop_last`). If processes loaded their own parts, the
    /// epoch ends with the shortest.
    Drop,
    /// It is an error, before the first step.
    Refuse,
}

/// Equally long parts of `items`, one a rank, in order.
///
/// # Errors
///
/// [`ZeroError::Strategy`] if there are none and [`Uneven::Refuse`] asks for them.
fn parts(items: usize, ranks: usize, uneven: Uneven) -> Result<Vec<Range<usize>>, ZeroError> {
    let (length, last) = match uneven {
        _ if items.is_multiple_of(ranks) => (items / ranks, items - items / ranks),
        Uneven::Repeat => (items.div_ceil(ranks), items - items.div_ceil(ranks)),
        Uneven::Drop => (items / ranks, items / ranks * (ranks - 1)),
        Uneven::Refuse => {
            return Err(ZeroError::Strategy(format!(
                "{items} items cannot be cut into {ranks} equal parts, and `Uneven::Refuse` asks for that: choose \
                 `Uneven::Repeat` or `Uneven::Drop`"
            )));
        }
    };
    // The first one begins at 0 and the last at `last`, the others evenly between.
    let start = |rank| rank * last / (ranks - 1).max(1);
    Ok((0..ranks)
        .map(|rank| start(rank)..start(rank) + length)
        .collect())
}

/// Checks that ranks can train on parts of these numbers of items, which their processes loaded.
///
/// # Errors
///
/// [`ZeroError::Strategy`] if one has none, or if they differ and [`Uneven::Refuse`] asks for equal ones.
pub(super) fn check_parts(items: &[i64], uneven: Uneven) -> Result<(), ZeroError> {
    let refused = |reason| Err(ZeroError::Strategy(reason));
    let is_equal = items.windows(2).all(|pair| pair[0] == pair[1]);
    if let (Some(rank), false) = (items.iter().position(|&items| items == 0), is_equal) {
        return refused(format!(
            "rank {rank} has no items to train on, but others have {items:?}, rank by rank: every process needs a part"
        ));
    }
    if uneven == Uneven::Refuse && !is_equal {
        return refused(format!(
            "the processes have {items:?} items to train on, rank by rank, and `Uneven::Refuse` asks for equally many: load \
             equal parts, or choose `Uneven::Repeat` or `Uneven::Drop`"
        ));
    }
    Ok(())
}

/// A loader for each rank. A loader that shuffles does so within each part, as Burn's `split_dataloader`.
///
/// Each process makes all parts: a shuffling loader gives each part another order, which must not depend on whether
/// ranks are threads or processes.
///
/// # Errors
///
/// As [`parts`].
pub(super) fn split<B: Backend, O>(
    loader: &Arc<dyn DataLoader<B, O>>,
    ranks: usize,
    uneven: Uneven,
) -> Result<Vec<Arc<dyn DataLoader<B, O>>>, ZeroError> {
    if ranks == 1 {
        return Ok(vec![loader.clone()]);
    }
    let items = loader.num_items();
    let parts = parts(items, ranks, uneven)?;
    let trained: usize = parts.iter().map(ExactSizeIterator::len).sum();
    if trained != items {
        log::info!("{items} items for {ranks} ranks: {trained} are trained on in each epoch");
    }
    Ok(parts
        .into_iter()
        .map(|part| loader.slice(part.start, part.end))
        .collect())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_are_equally_long_and_cover_the_data(items in 0_usize..200, ranks in 1_usize..9) {
            for uneven in [Uneven::Repeat, Uneven::Drop] {
                let parts = parts(items, ranks, uneven).unwrap();
                prop_assert_eq!(parts.len(), ranks);
                let length = parts[0].len();
                let mut seen = vec![0_usize; items];
                for part in parts {
                    prop_assert_eq!(part.len(), length);
                    part.for_each(|item| seen[item] += 1);
                }
                let total: usize = seen.iter().sum();
                prop_assert!(total.abs_diff(items) < ranks);
                match uneven {
                    Uneven::Repeat => prop_assert!(seen.iter().all(|&times| times >= 1)),
                    _ => prop_assert!(seen.iter().all(|&times| times <= 1)),
                }
            }
            prop_assert_eq!(parts(items, ranks, Uneven::Refuse).is_ok(), items % ranks == 0);
        }
    }
}
