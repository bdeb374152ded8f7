//! The text: tokens of the files, packed into sequences of equal length.

use std::path::{Path, PathBuf};

use burn::prelude::*;
use tokenizers::Tokenizer;

use super::options::{Options, Packing};
use crate::llm::Sequences;
use crate::training::error::TrainingError;

/// Tokens to read at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// `[context]`
    pub tokens: Vec<u32>,
    /// The places at which another document begins, ascending and above 0.
    pub boundaries: Vec<usize>,
}

/// The sequences to train on and to validate on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// To train on, in the order of the files.
    pub train: Vec<Sequence>,
    /// Held out.
    pub valid: Vec<Sequence>,
}

/// The part of the sequences that is held out without `--valid`.
const HELD_OUT: usize = 20;

impl Text {
    /// Reads and packs the files of the options, for a model of so many different tokens.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Io`]; [`TrainingError::Text`] for a tokenizer or a file that cannot be
    /// used; [`TrainingError::Options`] if the text does not fill a sequence to train on and one to
    /// validate on.
    pub fn load(options: &Options, vocabulary: usize) -> Result<Self, TrainingError> {
        let tokenizer = read_tokenizer(&options.model)?;
        let packed = |files: &[PathBuf]| {
            let documents: Vec<Vec<u32>> = files
                .iter()
                .map(|file| encode(&tokenizer, file, vocabulary))
                .collect::<Result<_, _>>()?;
            Ok::<_, TrainingError>(pack(&documents, options.context, options.packing))
        };
        let mut train = packed(&options.text)?;
        let (valid, needed) = if options.valid.is_empty() {
            let held_out = train.len().div_ceil(HELD_OUT);
            (train.split_off(train.len() - held_out), 2)
        } else {
            (packed(&options.valid)?, 1)
        };
        if train.is_empty() || valid.is_empty() {
            let (part, found) = if train.is_empty() {
                ("--text", train.len() + valid.len())
            } else {
                ("--valid", 0)
            };
            return Err(TrainingError::Options(format!(
                "the text is too short: {part} fills {found} sequences of --context {} tokens, and at least {needed} are needed; give a longer \
                 text or a smaller --context",
                options.context
            )));
        }
        Ok(Self { train, valid })
    }
}

fn read_tokenizer(model: &Path) -> Result<Tokenizer, TrainingError> {
    let path = model.join("tokenizer.json");
    let refused = |reason: String| TrainingError::Text {
        path: path.clone(),
        reason,
    };
    let parsed = Tokenizer::from_bytes(fs_err::read(&path)?);
    let mut tokenizer = parsed.map_err(|error| refused(error.to_string()))?;
    // A file may say how the text of its authors was cut and filled up.
    tokenizer.with_padding(None);
    let uncut = tokenizer.with_truncation(None);
    uncut.map_err(|error| refused(error.to_string()))?;
    Ok(tokenizer)
}

/// The tokens of a file, with those that the tokenizer puts around a text.
fn encode(
    tokenizer: &Tokenizer,
    file: &Path,
    vocabulary: usize,
) -> Result<Vec<u32>, TrainingError> {
    let refused = |reason| TrainingError::Text {
        path: file.to_owned(),
        reason,
    };
    let bytes = fs_err::read(file)?;
    let text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        refused(format!("is not UTF-8 at byte {at}; convert it first"))
    })?;
    let encoded = tokenizer.encode_fast(text, true);
    let encoding = encoded.map_err(|error| refused(error.to_string()))?;
    let tokens = encoding.get_ids().to_vec();
    let outside = tokens.iter().find(|token| **token as usize >= vocabulary);
    match outside {
        None => Ok(tokens),
        Some(token) => {
            let text = tokenizer.id_to_token(*token).unwrap_or_default();
            Err(refused(format!(
                "has token {token} ({text:?}), but the model's vocabulary ends before {vocabulary}: tokenizer.json is of another model"
            )))
        }
    }
}

/// Cuts the documents, one after the other, into sequences of `context` tokens. What does not fill
/// the last one is left out.
pub fn pack(documents: &[Vec<u32>], context: usize, packing: Packing) -> Vec<Sequence> {
    let tokens = documents.concat();
    let mut begins = Vec::new();
    if packing == Packing::Documents {
        let mut end = 0;
        for document in documents {
            begins.push(end);
            end += document.len();
        }
        // A file without tokens begins where the next one does.
        begins.dedup();
    }
    let sequence = |(number, tokens): (usize, &[u32])| {
        let start = number * context;
        let first = begins.partition_point(|begin| *begin <= start);
        let after = begins.partition_point(|begin| *begin < start + context);
        Sequence {
            tokens: tokens.to_vec(),
            boundaries: begins[first..after]
                .iter()
                .map(|begin| begin - start)
                .collect(),
        }
    };
    tokens
        .chunks_exact(context)
        .enumerate()
        .map(sequence)
        .collect()
}

/// Sequences of equal length as a batch on a device.
pub fn batch<B: Backend>(sequences: &[&Sequence], device: &B::Device) -> Sequences<B> {
    let time = sequences.first().map_or(0, |first| first.tokens.len());
    let tokens = sequences.iter().flat_map(|sequence| &sequence.tokens);
    let numbers: Vec<i32> = tokens.map(|token| *token as i32).collect();
    let data = TensorData::new(numbers, [sequences.len(), time]);
    Sequences {
        tokens: Tensor::from_data(data, device),
        boundaries: sequences
            .iter()
            .map(|sequence| sequence.boundaries.clone())
            .collect(),
    }
}
