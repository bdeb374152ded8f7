//! Decisions that all ranks take together, by value.

use super::ProcessGroup;
use crate::ZeroError;

/// Agreement on small values: each rank gives its own, all get the same result. Every call is one small collective.
///
/// # Errors
///
/// Those of [`ProcessGroup`].
pub trait Agree: ProcessGroup {
    /// Whether `value` is true on any rank: one rank's non-finite gradient makes all skip.
    fn agree_any(&self, label: &str, value: bool) -> Result<bool, ZeroError> {
        Ok(self
            .gather_bytes(label, vec![value.into()])?
            .concat()
            .contains(&1))
    }

    /// Every rank's number, in the order of ranks.
    fn gather_f64(&self, label: &str, value: f64) -> Result<Vec<f64>, ZeroError> {
        let all = self.gather_bytes(label, value.to_le_bytes().to_vec())?;
        Ok(numbers(&all, f64::from_le_bytes))
    }

    /// Every rank's integer, in the order of ranks.
    fn gather_i64(&self, label: &str, value: i64) -> Result<Vec<i64>, ZeroError> {
        let all = self.gather_bytes(label, value.to_le_bytes().to_vec())?;
        Ok(numbers(&all, i64::from_le_bytes))
    }

    /// The sum, added in the order of ranks; NaN if a rank has NaN.
    fn agree_sum(&self, label: &str, value: f64) -> Result<f64, ZeroError> {
        Ok(self.gather_f64(label, value)?.into_iter().sum())
    }

    /// Checks that all ranks have the same text, such as their settings.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Disagreement`] on all ranks, with this rank's text and the first that differs from it.
    fn agree_equal(&self, label: &str, text: &str) -> Result<(), ZeroError> {
        let texts = self.gather_bytes(label, text.as_bytes().to_vec())?;
        match texts.iter().position(|other| other != text.as_bytes()) {
            None => Ok(()),
            Some(peer) => Err(ZeroError::Disagreement {
                label: label.to_owned(),
                rank: self.rank(),
                value: text.to_owned(),
                peer,
                peer_value: String::from_utf8_lossy(&texts[peer]).into_owned(),
            }),
        }
    }
}

impl<G: ProcessGroup + ?Sized> Agree for G {}

/// The numbers of all ranks, of eight bytes each.
fn numbers<T>(all: &[Vec<u8>], read: fn([u8; 8]) -> T) -> Vec<T> {
    let bytes = all.iter().flat_map(|bytes| bytes.as_chunks().0);
    bytes.map(|&bytes| read(bytes)).collect()
}
