//! Sum and mean over ranks, defined once for all groups.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::buffer::Element;

/// How the elements of all ranks become one.
///
/// Both add in f32, rank after rank from 0 on, and round to the buffer's type once, at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ReduceOp {
    /// `x0 + x1 + ...`
    Sum,
    /// The sum divided by the world size, before it is rounded.
    Mean,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
        })
    }
}

/// Elements that are reduced at a time: the f32 accumulators stay in the first-level cache.
const BLOCK: usize = 1024;

/// Reduces `parts`, one slice a rank in the order of ranks, into `out`. All slices are equally long.
pub(crate) fn reduce<E: Element>(op: ReduceOp, parts: &[&[E]], out: &mut [E]) {
    let (mut sum, mut next) = ([0.0; BLOCK], [0.0; BLOCK]);
    for (index, out) in out.chunks_mut(BLOCK).enumerate() {
        let at = index * BLOCK..index * BLOCK + out.len();
        let (sum, next) = (&mut sum[..out.len()], &mut next[..out.len()]);
        E::widen(&parts[0][at.clone()], sum);
        for part in &parts[1..] {
            E::widen(&part[at.clone()], next);
            for (sum, next) in sum.iter_mut().zip(&*next) {
                *sum += next;
            }
        }
        if op == ReduceOp::Mean {
            let ranks = parts.len() as f32;
            sum.iter_mut().for_each(|sum| *sum /= ranks);
        }
        E::round(sum, out);
    }
}
