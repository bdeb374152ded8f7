//! What PyTorch computes, from `golden/numerics.txt`.

use std::collections::BTreeMap;

use burn_backend::FloatDType;

const TEXT: &str = include_str!("../../../golden/numerics.txt");

/// The exact numbers and PyTorch's errors, infinite where PyTorch's are not finite.
pub struct Expected {
    pub exact: Vec<f64>,
    pub error: Vec<f64>,
}

/// A matrix of operands.
pub struct Grid {
    pub rows: usize,
    pub columns: usize,
    pub values: Vec<f32>,
}

/// A case in one low type.
pub struct Reference {
    pub operands: Vec<Grid>,
    /// The result, and the gradient of each operand.
    pub expected: Vec<Expected>,
}

fn numbers(line: &str) -> Vec<f64> {
    line.split_whitespace()
        .map(|x| x.parse().expect("a number"))
        .collect()
}

/// Every case in a low type, by name.
pub fn references(low: FloatDType) -> BTreeMap<&'static str, Reference> {
    let label = if low == FloatDType::F16 {
        "f16"
    } else {
        "bf16"
    };
    let mut grids = BTreeMap::new();
    let mut found = BTreeMap::new();
    let mut lines = TEXT
        .lines()
        .filter(|line| !line.starts_with('#'))
        .peekable();
    while let Some(line) = lines.next() {
        let words: Vec<&'static str> = line.split_whitespace().collect();
        match words.as_slice() {
            ["grid", dtype, name, rows, columns] => {
                let size = [rows, columns].map(|x| x.parse().expect("a size"));
                let values: Vec<f32> = numbers(lines.next().expect("numbers"))
                    .iter()
                    .map(|x| *x as f32)
                    .collect();
                if *dtype == label {
                    grids.insert(*name, (size, values));
                }
            }
            ["case", name, dtype, operands @ ..] => {
                let mut expected = Vec::new();
                for _ in 0..=operands.len() {
                    let [exact, error] = [(); 2].map(|()| numbers(lines.next().expect("numbers")));
                    expected.push(Expected { exact, error });
                }
                if *dtype != label {
                    continue;
                }
                let operands = operands
                    .iter()
                    .map(|name| {
                        let ([rows, columns], values) = &grids[name];
                        Grid {
                            rows: *rows,
                            columns: *columns,
                            values: values.clone(),
                        }
                    })
                    .collect();
                found.insert(*name, Reference { operands, expected });
            }
            _ => panic!("{line}"),
        }
    }
    found
}
