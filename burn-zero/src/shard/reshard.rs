//! Elements on their way from one map to another: another world size, bucket size or partition.

use std::ops::Range;

use super::{Parameter, ShardMap};
use crate::ZeroError;

/// A position in a rank's shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The rank.
    pub rank: usize,
    /// Element of its shard.
    pub start: usize,
}

/// A range of a parameter that is in one rank's shard before and in one rank's shard after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Index of the parameter.
    pub parameter: usize,
    /// Elements of the parameter.
    pub range: Range<usize>,
    /// Where they are.
    pub from: Place,
    /// Where they go.
    pub to: Place,
}

impl ShardMap {
    /// How every element comes from this map's shards into those of `to`, in the order of parameters and elements.
    ///
    /// # Errors
    ///
    /// [`ZeroError::ForeignShardMap`] if the two are not about the same parameters.
    pub fn reshard(&self, to: &Self) -> Result<Vec<Move>, ZeroError> {
        check_parameters(self.parameters(), to.parameters())?;
        let (sources, targets) = (held(self), held(to));
        let (mut source, mut target) = (sources.iter().peekable(), targets.iter().peekable());
        let mut moves = Vec::new();
        while let (Some(from), Some(into)) = (source.peek(), target.peek()) {
            let range = from.range.start.max(into.range.start)..from.range.end.min(into.range.end);
            moves.push(Move {
                parameter: from.parameter,
                from: from.place(range.start),
                to: into.place(range.start),
                range: range.clone(),
            });
            let (from_ends, into_ends) = (from.range.end == range.end, into.range.end == range.end);
            if from_ends {
                source.next();
            }
            if into_ends {
                target.next();
            }
        }
        Ok(moves)
    }
}

/// A piece and its rank.
struct Held {
    parameter: usize,
    range: Range<usize>,
    place: Place,
}

impl Held {
    fn place(&self, element: usize) -> Place {
        let start = self.place.start + (element - self.range.start);
        Place {
            start,
            ..self.place
        }
    }
}

/// All ranks' pieces in the order of parameters and elements: they cover each element once.
fn held(map: &ShardMap) -> Vec<Held> {
    let of_rank = |rank| {
        map.pieces(rank).into_iter().map(move |piece| Held {
            parameter: piece.parameter,
            range: piece.range,
            place: Place {
                rank,
                start: piece.shard_start,
            },
        })
    };
    let mut held: Vec<_> = (0..map.world_size()).flat_map(of_rank).collect();
    held.sort_by_key(|held| (held.parameter, held.range.start));
    held
}

fn check_parameters(ours: &[Parameter], theirs: &[Parameter]) -> Result<(), ZeroError> {
    let describe = |parameter: Option<&Parameter>| match parameter {
        Some(parameter) => format!("{} ({} elements)", parameter.path, parameter.elements),
        None => "none".to_owned(),
    };
    match (0..ours.len().max(theirs.len())).find(|&index| ours.get(index) != theirs.get(index)) {
        None => Ok(()),
        Some(index) => Err(ZeroError::ForeignShardMap {
            index,
            ours: describe(ours.get(index)),
            theirs: describe(theirs.get(index)),
        }),
    }
}
