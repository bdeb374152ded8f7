//! A record of parts: every element of every tensor is in exactly one piece, and all ranks mean the same.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::manifest::{CHUNK_BYTES, Manifest, PartRow, TensorRow};
use super::{RecordError, TrainingState};

/// What a rank tells rank 0 of its part.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PartTable {
    pub part: PartRow,
    pub state: TrainingState,
    pub generator: Value,
    /// In the order in which their owner gave them; empty ones too, for they declare a tensor.
    pub pieces: Vec<(String, TensorRow)>,
}

impl Manifest {
    /// The record whose ranks wrote `parts`, if each element of each tensor is on exactly one of them.
    pub fn assemble(parts: Vec<PartTable>) -> Result<Self, RecordError> {
        let mut manifest = Self {
            world_size: parts.len(),
            chunk_bytes: CHUNK_BYTES,
            state: parts
                .first()
                .map_or_else(TrainingState::default, |first| first.state.clone()),
            generators: Vec::new(),
            parts: Vec::new(),
            tensors: BTreeMap::new(),
        };
        let mut declared_by = BTreeMap::new();
        for (rank, table) in parts.into_iter().enumerate() {
            same_state(rank, &table.state, &manifest.state)?;
            unite(rank, &mut manifest.state.optimizer, table.state.optimizer)?;
            manifest.parts.push(table.part);
            manifest.generators.push(table.generator);
            for (name, row) in table.pieces {
                let first = *declared_by.entry(name.clone()).or_insert(rank);
                manifest.add(name, row, rank, first)?;
            }
        }
        for row in manifest.tensors.values_mut() {
            row.pieces.retain(|piece| piece.len > 0);
            row.pieces.sort_by_key(|piece| (piece.offset, piece.rank));
        }
        manifest.check()?;
        Ok(manifest)
    }

    fn add(
        &mut self,
        name: String,
        row: TensorRow,
        rank: usize,
        first_rank: usize,
    ) -> Result<(), RecordError> {
        let Some(known) = self.tensors.get_mut(&name) else {
            self.tensors.insert(name, row);
            return Ok(());
        };
        if (known.dtype, &known.shape) != (row.dtype, &row.shape) {
            return Err(RecordError::Contradiction {
                name,
                first_rank,
                first: (known.dtype, known.shape.clone()),
                second_rank: rank,
                second: (row.dtype, row.shape),
            });
        }
        known.pieces.extend(row.pieces);
        Ok(())
    }

    /// That every element of every tensor is in exactly one piece.
    pub fn check(&self) -> Result<(), RecordError> {
        for (name, row) in &self.tensors {
            let spec = row.spec(name);
            spec.check(&(0..0))?;
            for piece in &row.pieces {
                spec.check(&piece.range())?;
            }
            check_cover(name, row)?;
        }
        Ok(())
    }
}

fn same_state(
    rank: usize,
    theirs: &TrainingState,
    ours: &TrainingState,
) -> Result<(), RecordError> {
    let differ = |what, theirs: String, ours: String| {
        Err(RecordError::RanksDiffer {
            what,
            rank,
            theirs,
            ours,
        })
    };
    if theirs.step != ours.step {
        return differ("step", theirs.step.to_string(), ours.step.to_string());
    }
    if theirs.scaler != ours.scaler {
        return differ("scaler", theirs.scaler.to_string(), ours.scaler.to_string());
    }
    if theirs.scheduler != ours.scheduler {
        let (theirs, ours) = (&theirs.scheduler, &ours.scheduler);
        return differ("scheduler", theirs.to_string(), ours.to_string());
    }
    for key in ours.user.keys().chain(theirs.user.keys()) {
        let text = |state: &TrainingState| match state.user.get(key) {
            Some(value) => format!("{key}: {value}"),
            None => format!("without {key}"),
        };
        if theirs.user.get(key) != ours.user.get(key) {
            return differ("user state", text(theirs), text(ours));
        }
    }
    Ok(())
}

/// Adds what is not there yet: each rank knows the parameters of its shard.
fn unite(rank: usize, ours: &mut Value, theirs: Value) -> Result<(), RecordError> {
    match (ours, theirs) {
        (ours @ Value::Null, theirs) => *ours = theirs,
        (_, Value::Null) => {}
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in theirs {
                unite(rank, ours.entry(key).or_insert(Value::Null), value)?;
            }
        }
        (ours, theirs) if *ours == theirs => {}
        (ours, theirs) => {
            return Err(RecordError::RanksDiffer {
                what: "optimizer state",
                rank,
                theirs: theirs.to_string(),
                ours: ours.to_string(),
            });
        }
    }
    Ok(())
}

/// That the sorted pieces of `row` follow each other from the first element to the last.
fn check_cover(name: &str, row: &TensorRow) -> Result<(), RecordError> {
    let mut covered = 0;
    let mut last_rank = 0;
    for piece in &row.pieces {
        if piece.offset < covered {
            return Err(RecordError::Overlap {
                name: name.to_owned(),
                range: piece.offset..covered.min(piece.range().end),
                first_rank: last_rank,
                second_rank: piece.rank,
            });
        }
        if piece.offset > covered {
            return Err(RecordError::NotCovered {
                name: name.to_owned(),
                range: covered..piece.offset,
            });
        }
        (covered, last_rank) = (piece.range().end, piece.rank);
    }
    match row.spec(name).elements() {
        Some(elements) if elements == covered => Ok(()),
        elements => Err(RecordError::NotCovered {
            name: name.to_owned(),
            range: covered..elements.unwrap_or(usize::MAX),
        }),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use safetensors::Dtype;

    use super::super::layout::part_file;
    use super::super::manifest::PieceRow;
    use super::*;

    fn part(rank: usize, world_size: usize, pieces: &[(&str, usize, usize)]) -> PartTable {
        let row = |&(name, offset, len): &(&str, usize, usize)| {
            let piece = PieceRow {
                rank,
                offset,
                len,
                crc32: vec![7; usize::from(len > 0)],
            };
            let row = TensorRow {
                dtype: Dtype::F32,
                shape: vec![2, 5],
                pieces: vec![piece],
            };
            (name.to_owned(), row)
        };
        PartTable {
            part: PartRow {
                file: part_file(rank, world_size),
                bytes: 100,
                header_crc32: 3,
            },
            state: TrainingState::at_step(5),
            generator: Value::from(rank),
            pieces: pieces.iter().map(row).collect(),
        }
    }

    /// A record of two ranks.
    pub(in super::super) fn whole() -> Manifest {
        let parts = vec![
            part(0, 2, &[("a", 4, 6), ("b", 10, 0)]),
            part(1, 2, &[("b", 0, 10), ("a", 0, 4)]),
        ];
        Manifest::assemble(parts).unwrap()
    }

    #[test]
    fn each_element_is_on_one_rank() {
        let overlap = vec![part(0, 2, &[("a", 0, 6)]), part(1, 2, &[("a", 5, 5)])];
        assert_eq!(
            Manifest::assemble(overlap).unwrap_err().to_string(),
            "elements 5..6 of `a` are in a piece of rank 0 and again in one of rank 1"
        );
        let gap = vec![part(0, 2, &[("a", 0, 6)]), part(1, 2, &[("a", 7, 3)])];
        let error = Manifest::assemble(gap).unwrap_err().to_string();
        assert_eq!(error, "elements 6..7 of `a` are on no rank");
        let short = vec![part(0, 1, &[("a", 0, 6)])];
        let error = Manifest::assemble(short).unwrap_err().to_string();
        assert_eq!(error, "elements 6..10 of `a` are on no rank");
    }

    #[test]
    fn ranks_agree() {
        let mut parts = vec![part(0, 2, &[("a", 0, 6)]), part(1, 2, &[("a", 6, 4)])];
        parts[1].pieces[0].1.shape = vec![10];
        assert_eq!(
            Manifest::assemble(parts.clone()).unwrap_err().to_string(),
            "`a` is F32 [2, 5] of rank 0 and F32 [10] of rank 1"
        );
        parts[1].state.user.insert("epoch".into(), 3.into());
        assert_eq!(
            Manifest::assemble(parts).unwrap_err().to_string(),
            "rank 1 has user state epoch: 3, rank 0 without epoch: all ranks save and load the same record"
        );
    }
}
