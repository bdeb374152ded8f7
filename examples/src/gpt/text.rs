//! The text: where it comes from and which part of it is held out.

use std::fs;
use std::path::{Path, PathBuf};

use super::error::GptError;

/// The bytes to train on and the bytes to validate on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Text {
    /// Nine tenths of the text.
    pub train: Vec<u8>,
    /// The held-out tenth.
    pub valid: Vec<u8>,
}

/// The held-out tenth is taken in this many pieces, evenly spread: files of one kind often lie side by side, and the end
/// of a text is seldom like its beginning.
const PIECES: usize = 20;

impl Text {
    /// The text of these files; without files the sources and the documentation of this repository.
    ///
    /// # Errors
    ///
    /// A file cannot be read, or there is no text.
    pub fn load(files: &[PathBuf]) -> Result<Self, GptError> {
        if files.is_empty() {
            let root = repository();
            let files = sources(&root)?;
            Self::read(&files, &format!("{} (*.rs, *.md)", root.display()))
        } else {
            let names: Vec<_> = files
                .iter()
                .map(|file| file.display().to_string())
                .collect();
            Self::read(files, &names.join(", "))
        }
    }

    fn read(files: &[PathBuf], place: &str) -> Result<Self, GptError> {
        let mut bytes = Vec::new();
        for file in files {
            bytes.extend(fs::read(file).map_err(GptError::io("read", file))?);
        }
        if bytes.is_empty() {
            return Err(GptError::NoText {
                place: place.into(),
            });
        }
        Ok(Self::split(&bytes))
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
    #[allow(clippy::len_without_is_empty, reason = "there is no empty text")]
    pub fn len(&self) -> usize {
        self.train.len() + self.valid.len()
    }

    /// Checks that both parts hold at least one sequence and the byte after it.
    ///
    /// # Errors
    ///
    /// [`GptError::TextTooShort`] naming the part.
    pub fn check(&self, context: usize) -> Result<(), GptError> {
        for (part, bytes) in [("training", &self.train), ("validation", &self.valid)] {
            if bytes.len() <= context {
                return Err(GptError::TextTooShort {
                    bytes: self.len(),
                    part,
                    part_bytes: bytes.len(),
                    context,
                });
            }
        }
        Ok(())
    }
}

/// The root of the repository that this example was built in.
fn repository() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().unwrap_or(package).to_path_buf()
}

/// All sources and documentation under a directory, sorted by path so that the text is the same on every machine.
fn sources(root: &Path) -> Result<Vec<PathBuf>, GptError> {
    let mut files = Vec::new();
    let mut directories = vec![root.to_path_buf()];
    while let Some(directory) = directories.pop() {
        let entries = fs::read_dir(&directory).map_err(GptError::io("list", &directory))?;
        for entry in entries {
            let entry = entry.map_err(GptError::io("list", &directory))?;
            let kind = entry
                .file_type()
                .map_err(GptError::io("inspect", entry.path()))?;
            let path = entry.path();
            // Links are not followed: they could lead out of the repository or form a cycle.
            if kind.is_dir() && !is_generated(&path) {
                directories.push(path);
            } else if kind.is_file() && is_source(&path) {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Build outputs, runs and hidden directories.
fn is_generated(directory: &Path) -> bool {
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    name.starts_with('.') || name == "target" || name == "artifacts"
}

fn is_source(file: &Path) -> bool {
    file.extension()
        .is_some_and(|extension| extension == "rs" || extension == "md")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenth_is_held_out_and_nothing_is_lost() {
        let bytes: Vec<u8> = (0..10_000).map(|i| (i % 251) as u8).collect();
        let text = Text::split(&bytes);
        assert_eq!(text.valid.len(), 1_000);
        assert_eq!(text.train.len(), 9_000);
        assert_eq!(&text.train[..450], &bytes[..450]);
        assert_eq!(&text.valid[..50], &bytes[450..500]);
        assert_eq!(&text.train[450..900], &bytes[500..950]);
    }

    #[test]
    fn the_repository_has_text_sorted_by_path() {
        let files = sources(&repository()).unwrap();
        assert!(files.contains(&repository().join("examples/src/gpt/text.rs")));
        assert!(files.is_sorted());
        assert!(
            !files
                .iter()
                .any(|file| file.starts_with(repository().join("target")))
        );
    }

    #[test]
    fn only_sources_outside_generated_directories_count() {
        let root = tempfile::tempdir().unwrap();
        for file in [
            "b.rs",
            "a/z.md",
            "a/z.txt",
            "target/c.rs",
            ".git/d.md",
            "artifacts/e.rs",
        ] {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "text").unwrap();
        }
        let files = sources(root.path()).unwrap();
        assert_eq!(
            files,
            [root.path().join("a/z.md"), root.path().join("b.rs")]
        );
    }

    #[test]
    fn missing_empty_and_short_texts_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let missing = directory.path().join("missing.txt");
        let error = Text::load(std::slice::from_ref(&missing))
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with(&format!("cannot read {}: ", missing.display())),
            "{error}"
        );

        let empty = directory.path().join("empty.txt");
        fs::write(&empty, "").unwrap();
        let error = Text::load(std::slice::from_ref(&empty))
            .unwrap_err()
            .to_string();
        assert_eq!(error, format!("there is no text in {}", empty.display()));

        let text = Text::split(&[b'x'; 600]);
        assert!(text.check(59).is_ok());
        let error = text.check(60).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "the text is too short: 600 bytes leave 60 for validation, and --context 60 needs 61"
            ),
            "{error}"
        );
    }
}
