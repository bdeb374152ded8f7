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

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    #[test]
    fn half_precision_is_rounded_once() {
        // 256 + 1 is not a bf16: adding hop by hop would lose every 1.
        let ranks: Vec<Vec<bf16>> = [256.0, 1.0, 1.0, 1.0, 1.0]
            .iter()
            .map(|&value| vec![bf16::from_f32(value); 3])
            .collect();
        let parts: Vec<&[bf16]> = ranks.iter().map(Vec::as_slice).collect();
        let mut out = [bf16::ZERO; 3];
        reduce(ReduceOp::Sum, &parts, &mut out);
        assert_eq!(out, [bf16::from_f32(260.0); 3]);
    }

    #[test]
    fn the_mean_of_large_half_values_does_not_overflow() {
        let large = vec![f16::from_f32(60_000.0); 2];
        let mut out = [f16::ZERO; 2];
        reduce(ReduceOp::Mean, &[&large, &large, &large], &mut out);
        assert_eq!(out, [f16::from_f32(60_000.0); 2]);
    }

    #[test]
    fn blocks_do_not_show() {
        let ranks: Vec<Vec<f32>> = (0..3)
            .map(|rank| {
                (0..2 * BLOCK + 7)
                    .map(|i| (i * 7 + rank * 13) as f32 * 0.1)
                    .collect()
            })
            .collect();
        let parts: Vec<&[f32]> = ranks.iter().map(Vec::as_slice).collect();
        let mut out = vec![0.0; 2 * BLOCK + 7];
        reduce(ReduceOp::Mean, &parts, &mut out);
        for (i, out) in out.iter().enumerate() {
            assert_eq!(*out, (ranks[0][i] + ranks[1][i] + ranks[2][i]) / 3.0);
        }
    }
}
