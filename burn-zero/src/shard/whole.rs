//! The assignment of whole parameters to ranks.

use std::{cmp::Reverse, collections::BinaryHeap};

use super::Parameter;

/// The owner of each parameter: the largest first, each to the rank with the fewest elements (Graham's LPT rule, within 4/3 of the
/// optimum). Ties are broken by position and by rank, so that all ranks compute the same owners.
pub(super) fn owners(parameters: &[Parameter], world_size: usize) -> Vec<usize> {
    let mut largest_first: Vec<usize> = (0..parameters.len()).collect();
    largest_first.sort_by_key(|&index| (Reverse(parameters[index].elements), index));
    let mut least_loaded: BinaryHeap<_> = (0..world_size).map(|rank| Reverse((0, rank))).collect();
    let mut owners = vec![0; parameters.len()];
    for index in largest_first {
        if let Some(Reverse((load, rank))) = least_loaded.pop() {
            owners[index] = rank;
            least_loaded.push(Reverse((load + parameters[index].elements, rank)));
        }
    }
    owners
}
