//! The text: where it comes from and which part of it is held out.

use std::path::PathBuf;

use fs_err as fs;

use crate::training::error::TrainingError;

/// The sources of this repository's packages, as they were when the program was built.
const SOURCES: &str = include_str!(concat!(env!("OUT_DIR"), "/sources.txt"));

/// The bytes to train on and the bytes to validate on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// Nine tenths of the text.
    pub train: Vec<u8>,
    /// The held-out tenth.
    pub valid: Vec<u8>,
}

/// The held-out tenth is taken in this many pieces, evenly spread: the end of a text is seldom like
/// its beginning.
const PIECES: usize = 20;

impl Text {
    /// The text of these files; without files the sources of this repository, which are part of the
    /// program.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Io`]; [`TrainingError::Options`] if a part of the text does not hold one sequence and
    /// the byte after it.
    pub fn load(files: &[PathBuf], context: usize) -> Result<Self, TrainingError> {
        let mut bytes = Vec::new();
        for file in files {
            bytes.extend(fs::read(file)?);
        }
        let text = Self::split(match files {
            [] => SOURCES.as_bytes(),
            _ => &bytes,
        });
        let (bytes, held_out) = (text.bytes(), text.valid.len());
        if held_out <= context {
            return Err(TrainingError::Options(format!(
                "the text is too short: {bytes} bytes leave {held_out} for validation, and --context {context} needs {}; give a longer \
                 --text or a smaller --context",
                context + 1
            )));
        }
        Ok(text)
    }

    /// The last tenth of each of the pieces is held out.
    pub fn split(bytes: &[u8]) -> Self {
        let mut text = Self {
            train: Vec::new(),
            valid: Vec::new(),
        };
        for piece in bytes.chunks(bytes.len().div_ceil(PIECES).max(1)) {
            let (train, valid) = piece.split_at(piece.len() - piece.len() / 10);
            text.train.extend(train);
            text.valid.extend(valid);
        }
        text
    }

    /// Bytes of both parts.
    pub fn bytes(&self) -> usize {
        self.train.len() + self.valid.len()
    }
}
