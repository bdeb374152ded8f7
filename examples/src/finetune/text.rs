//! The text: tokens of the files, packed into sequences of equal length, or of conversations, each a
//! sequence.

use std::path::{Path, PathBuf};

use burn::prelude::*;
use tokenizers::Tokenizer;

use super::chat::{ChatTemplate, read_conversations};
use super::options::{Options, Packing};
use crate::llm::Sequences;
use crate::training::error::TrainingError;

/// Tokens to read at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// At most the context.
    pub tokens: Vec<u32>,
    /// The places at which another document begins, ascending and above 0.
    pub boundaries: Vec<usize>,
    /// Whether the loss has each token, where it does not have all. `[tokens]`
    pub counted: Option<Vec<bool>>,
}

impl Sequence {
    /// Whether the loss has any of its tokens. The first is not predicted.
    fn is_counted(&self) -> bool {
        let Some(counted) = &self.counted else {
            return true;
        };
        let mut places = 1..counted.len();
        places.any(|place| counted[place] && !self.boundaries.contains(&place))
    }
}

/// The sequences to train on and to validate on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// To train on, in the order of the files.
    pub train: Vec<Sequence>,
    /// Held out.
    pub valid: Vec<Sequence>,
    /// Conversations that were longer than the context, and were cut there or, without an answer
    /// before it, left out.
    pub cut: usize,
}

/// The part of the sequences that is held out without `--valid`.
const HELD_OUT: usize = 20;

impl Text {
    /// Reads and packs the files of the options, for a model of so many different tokens.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Io`]; [`TrainingError::Text`] for a tokenizer, a template or a file that
    /// cannot be used; [`TrainingError::Options`] if there is not a sequence to train on and one to
    /// validate on.
    pub fn load(options: &Options, vocabulary: usize) -> Result<Self, TrainingError> {
        let mut files = Files {
            options,
            tokenizer: read_tokenizer(&options.model)?,
            template: None,
            vocabulary,
            cut: 0,
        };
        let is_chat = !options.chat.is_empty();
        if is_chat {
            files.template = Some(ChatTemplate::read(&options.model)?);
        }
        let (given, name) = if is_chat {
            (&options.chat, "--chat")
        } else {
            (&options.text, "--text")
        };
        let mut train = files.sequences(given)?;
        let found = train.len();
        let (valid, needed) = if options.valid.is_empty() {
            let held_out = train.len().div_ceil(HELD_OUT);
            (train.split_off(train.len() - held_out), 2)
        } else {
            (files.sequences(&options.valid)?, 1)
        };
        if train.is_empty() || valid.is_empty() {
            let (part, found) = if train.is_empty() {
                (name, found)
            } else {
                ("--valid", 0)
            };
            return Err(TrainingError::Options(format!(
                "there is too little to read: {part} has {found} sequences of --context {} tokens, and at least {needed} are needed; give \
                 more text or another --context",
                options.context
            )));
        }
        let cut = files.cut;
        Ok(Self { train, valid, cut })
    }
}

/// What reads the files of a training.
struct Files<'a> {
    options: &'a Options,
    tokenizer: Tokenizer,
    /// For conversations.
    template: Option<ChatTemplate>,
    vocabulary: usize,
    /// Conversations that were too long.
    cut: usize,
}

impl Files<'_> {
    fn sequences(&mut self, files: &[PathBuf]) -> Result<Vec<Sequence>, TrainingError> {
        let Self {
            options: Options { context, .. },
            vocabulary,
            ..
        } = *self;
        let mut documents = Vec::new();
        for file in files {
            match &self.template {
                None => documents.push(encode(&self.tokenizer, file, vocabulary)?),
                Some(template) => {
                    let read = read_conversations(file, template, &self.tokenizer, vocabulary)?;
                    documents.extend(read);
                }
            }
        }
        if self.template.is_some() {
            for document in &mut documents {
                if document.tokens.len() > *context {
                    self.cut += 1;
                    document.tokens.truncate(*context);
                    if let Some(counted) = &mut document.counted {
                        counted.truncate(*context);
                    }
                }
            }
        }
        let mut sequences = match self.options.packing() {
            Packing::None => documents,
            packing => pack(&documents, *context, packing),
        };
        sequences.retain(Sequence::is_counted);
        Ok(sequences)
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
) -> Result<Sequence, TrainingError> {
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
    check_vocabulary(tokenizer, &tokens, vocabulary).map_err(refused)?;
    Ok(Sequence {
        tokens,
        boundaries: Vec::new(),
        counted: None,
    })
}

/// # Errors
///
/// The first token that the model has not.
pub(super) fn check_vocabulary(
    tokenizer: &Tokenizer,
    tokens: &[u32],
    vocabulary: usize,
) -> Result<(), String> {
    let outside = tokens.iter().find(|token| **token as usize >= vocabulary);
    let Some(token) = outside else {
        return Ok(());
    };
    let text = tokenizer.id_to_token(*token).unwrap_or_default();
    Err(format!(
        "has token {token} ({text:?}), but the model's vocabulary ends before {vocabulary}: tokenizer.json is of another model"
    ))
}

/// Cuts the documents, one after the other, into sequences of `context` tokens. What does not fill
/// the last one is left out.
pub fn pack(documents: &[Sequence], context: usize, packing: Packing) -> Vec<Sequence> {
    let mut tokens = Vec::new();
    let mut counted = Vec::new();
    let mut begins = Vec::new();
    for document in documents {
        begins.push(tokens.len());
        tokens.extend_from_slice(&document.tokens);
        match &document.counted {
            Some(some) => counted.extend_from_slice(some),
            None => counted.resize(tokens.len(), true),
        }
    }
    if packing == Packing::Documents {
        // A file without tokens begins where the next one does.
        begins.dedup();
    } else {
        begins.clear();
    }
    let are_all_counted = documents.iter().all(|document| document.counted.is_none());
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
            counted: (!are_all_counted).then(|| counted[start..start + context].to_vec()),
        }
    };
    tokens
        .chunks_exact(context)
        .enumerate()
        .map(sequence)
        .collect()
}

/// Sequences as a batch on a device, shorter ones filled up at their ends: no token reads what is
/// after it, and the loss does not have these.
pub fn batch<B: Backend>(sequences: &[&Sequence], device: &B::Device) -> Sequences<B> {
    const FILLING: i32 = 0;
    let lengths = sequences.iter().map(|sequence| sequence.tokens.len());
    let time = lengths.max().unwrap_or(0);
    let mut numbers = Vec::with_capacity(sequences.len() * time);
    for sequence in sequences {
        numbers.extend(sequence.tokens.iter().map(|token| *token as i32));
        numbers.resize(numbers.len() + time - sequence.tokens.len(), FILLING);
    }
    let is_whole =
        |sequence: &&Sequence| sequence.counted.is_none() && sequence.tokens.len() == time;
    let counted = (!sequences.iter().all(is_whole)).then(|| {
        let of_sequence = |sequence: &&Sequence| {
            let all = vec![true; sequence.tokens.len()];
            let mut counted = sequence.counted.clone().unwrap_or(all);
            counted.resize(time, false);
            counted
        };
        sequences.iter().map(of_sequence).collect()
    });
    let data = TensorData::new(numbers, [sequences.len(), time]);
    Sequences {
        tokens: Tensor::from_data(data, device),
        boundaries: sequences
            .iter()
            .map(|sequence| sequence.boundaries.clone())
            .collect(),
        counted,
    }
}
