//! What a rank gives to a record and wants from one: a contiguous piece of a named tensor.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use safetensors::Dtype;

use super::RecordError;
use super::manifest::CHUNK_BYTES;

/// The longest name of an entry, in bytes.
const MAX_NAME_BYTES: usize = 1024;

/// A tensor of a record as a whole: the same on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// Section and path, such as `model/blocks.0.mlp.weight` or `optimizer/moment_1/blocks.0.mlp.weight`.
    pub name: String,
    /// Type of the elements.
    pub dtype: Dtype,
    /// The whole tensor's shape; `[]` is a scalar.
    pub shape: Vec<usize>,
}

impl TensorSpec {
    /// A tensor of `shape`.
    pub fn new(name: impl Into<String>, dtype: Dtype, shape: impl Into<Vec<usize>>) -> Self {
        Self {
            name: name.into(),
            dtype,
            shape: shape.into(),
        }
    }

    /// How many elements the whole tensor has, `None` if the machine cannot count that far.
    pub fn elements(&self) -> Option<usize> {
        self.shape
            .iter()
            .try_fold(1_usize, |product, &dim| product.checked_mul(dim))
    }

    /// Bytes of one element.
    pub(crate) fn element_bytes(&self) -> usize {
        self.dtype.bitsize() / 8
    }

    /// That the name can be one, and that `range` is a part of the tensor that this machine can address.
    pub(super) fn check(&self, range: &Range<usize>) -> Result<(), RecordError> {
        check_name(&self.name)?;
        if !self.dtype.bitsize().is_multiple_of(8) {
            return Err(RecordError::SubByte {
                name: self.name.clone(),
                dtype: self.dtype,
            });
        }
        let elements = self.elements().unwrap_or(usize::MAX);
        let addressable = elements.checked_mul(self.element_bytes()).is_some();
        if !addressable || range.start > range.end || range.end > elements {
            return Err(RecordError::OutOfBounds {
                name: self.name.clone(),
                range: range.clone(),
                shape: self.shape.clone(),
                elements,
            });
        }
        Ok(())
    }
}

/// Refuses names that could not be keys of a safetensors file, or would leave a directory if a tool made paths of them.
fn check_name(name: &str) -> Result<(), RecordError> {
    let refused = |reason| {
        Err(RecordError::InvalidName {
            name: name.to_owned(),
            reason,
        })
    };
    if name.len() > MAX_NAME_BYTES {
        return refused("it is longer than 1024 bytes");
    }
    if name == "__metadata__" {
        return refused("safetensors keeps this name for itself");
    }
    if name.contains('\\') || name.chars().any(char::is_control) {
        return refused("it has a backslash or a control character");
    }
    if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return refused("a part between slashes is empty, `.` or `..`");
    }
    Ok(())
}

/// A piece of a tensor as flat elements in row-major order: what one rank holds or wants of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The tensor.
    pub tensor: TensorSpec,
    /// The elements of the flattened tensor, counted from 0; may be empty.
    pub range: Range<usize>,
}

impl Piece {
    /// The elements `range` of `tensor`.
    pub fn new(tensor: TensorSpec, range: Range<usize>) -> Self {
        Self { tensor, range }
    }

    /// All elements of `tensor`.
    ///
    /// # Panics
    ///
    /// If the machine cannot count them.
    pub fn whole(tensor: TensorSpec) -> Self {
        let elements = tensor.elements();
        let elements = elements.expect("a tensor in memory has a countable number of elements");
        Self::new(tensor, 0..elements)
    }

    /// Bytes of the piece.
    pub fn bytes(&self) -> usize {
        self.range.len() * self.tensor.element_bytes()
    }

    pub(super) fn check(&self) -> Result<(), RecordError> {
        self.tensor.check(&self.range)
    }

    /// It in pieces of as many bytes as are under one checksum, in order.
    pub(super) fn chunks(self) -> impl Iterator<Item = Self> {
        let elements = CHUNK_BYTES / self.tensor.element_bytes();
        let Range { start, end } = self.range;
        let starts = (start..end).step_by(elements);
        starts.map(move |start| Self {
            tensor: self.tensor.clone(),
            range: start..end.min(start + elements),
        })
    }
}

/// Why the one who saves or loads could not give or take the bytes of a piece.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

enum Source<'a> {
    Ready(Cow<'a, [u8]>),
    Lazy(Box<dyn FnOnce() -> Result<Cow<'a, [u8]>, Failure> + 'a>),
}

/// A piece and its bytes: little-endian elements, nothing between them.
pub struct Entry<'a> {
    pub(super) piece: Piece,
    source: Source<'a>,
}

impl<'a> Entry<'a> {
    /// A piece whose bytes are at hand, borrowed or owned.
    pub fn new(piece: Piece, bytes: impl Into<Cow<'a, [u8]>>) -> Self {
        Self {
            piece,
            source: Source::Ready(bytes.into()),
        }
    }

    /// A piece whose bytes are read when they are written, one entry after the other, so that there is never a second copy
    /// of the state: from a device, for example.
    pub fn lazy(piece: Piece, bytes: impl FnOnce() -> Result<Cow<'a, [u8]>, Failure> + 'a) -> Self {
        Self {
            piece,
            source: Source::Lazy(Box::new(bytes)),
        }
    }

    /// What it is a piece of.
    pub fn piece(&self) -> &Piece {
        &self.piece
    }

    /// That what can be known before writing is right.
    pub(super) fn check(&self) -> Result<(), RecordError> {
        self.piece.check()?;
        match &self.source {
            Source::Ready(bytes) => check_bytes(&self.piece, bytes),
            Source::Lazy(_) => Ok(()),
        }
    }

    /// Its bytes, as many as the piece has.
    pub(super) fn into_bytes(self) -> Result<Cow<'a, [u8]>, RecordError> {
        let bytes = match self.source {
            Source::Ready(bytes) => bytes,
            Source::Lazy(read) => read().map_err(|reason| RecordError::Unavailable {
                name: self.piece.tensor.name.clone(),
                reason: reason.to_string(),
            })?,
        };
        check_bytes(&self.piece, &bytes)?;
        Ok(bytes)
    }
}

impl fmt::Debug for Entry<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Entry").field(&self.piece).finish()
    }
}

fn check_bytes(piece: &Piece, bytes: &[u8]) -> Result<(), RecordError> {
    if bytes.len() == piece.bytes() {
        return Ok(());
    }
    Err(RecordError::ByteLength {
        name: piece.tensor.name.clone(),
        expected: piece.bytes(),
        found: bytes.len(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(name: &str) -> TensorSpec {
        TensorSpec::new(name, Dtype::F32, [2, 3])
    }

    #[test]
    fn names_stay_inside() {
        for good in ["model/blocks.0.weight", "step", "a/b/c..d", "model/größe"] {
            spec(good).check(&(0..6)).unwrap();
        }
        let long = "x".repeat(1025);
        for bad in [
            "",
            "/etc",
            "a//b",
            "a/../b",
            "..",
            ".",
            "a\\b",
            "a\nb",
            "__metadata__",
            &long,
        ] {
            let error = spec(bad).check(&(0..6)).unwrap_err();
            assert!(matches!(error, RecordError::InvalidName { .. }), "{bad:?}");
        }
    }

    #[test]
    fn pieces_stay_inside() {
        spec("a").check(&(6..6)).unwrap();
        let beyond = spec("a").check(&(4..7)).unwrap_err();
        assert_eq!(
            beyond.to_string(),
            "elements 4..7 of `a` of shape [2, 3]: it has 6"
        );
        let huge = TensorSpec::new("a", Dtype::F32, [usize::MAX / 2, 1]);
        assert!(matches!(
            huge.check(&(0..1)),
            Err(RecordError::OutOfBounds { .. })
        ));
        let sub_byte = TensorSpec::new("a", Dtype::F4, [2]);
        assert!(matches!(
            sub_byte.check(&(0..1)),
            Err(RecordError::SubByte { .. })
        ));
    }

    #[test]
    fn bytes_are_those_of_the_piece() {
        let piece = Piece::new(spec("a"), 1..3);
        assert!(Entry::new(piece.clone(), vec![0; 8]).check().is_ok());
        assert!(Entry::new(piece.clone(), vec![0; 7]).check().is_err());
        let lazy = Entry::lazy(piece.clone(), || Ok(vec![0; 9].into()));
        let error = lazy.into_bytes().unwrap_err();
        assert!(matches!(
            error,
            RecordError::ByteLength {
                expected: 8,
                found: 9,
                ..
            }
        ));
        let failing = Entry::lazy(piece, || Err("device lost".into()));
        let error = failing.into_bytes().unwrap_err().to_string();
        assert_eq!(error, "cannot get the bytes of `a`: device lost");
    }
}
