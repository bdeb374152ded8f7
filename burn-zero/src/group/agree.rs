//! Decisions that all ranks take together, by value.

use super::ProcessGroup;
use crate::ZeroError;

/// Small values on which all ranks agree: each gives its own, all get the same. Every call is one small collective.
///
/// # Errors
///
/// Those of [`ProcessGroup`].
pub trait Agree: ProcessGroup {
    /// Whether any rank says yes: one rank's non-finite gradient makes all skip.
    fn agree_any(&self, label: &str, value: bool) -> Result<bool, ZeroError> {
        Ok(self
            .gather_bytes(label, vec![value.into()])?
            .concat()
            .contains(&1))
    }

    /// Whether all ranks say yes.
    fn agree_all(&self, label: &str, value: bool) -> Result<bool, ZeroError> {
        Ok(!self.agree_any(label, !value)?)
    }

    /// Every rank's number, in the order of ranks.
    fn gather_f64(&self, label: &str, value: f64) -> Result<Vec<f64>, ZeroError> {
        let all = self
            .gather_bytes(label, value.to_le_bytes().to_vec())?
            .concat();
        Ok(all
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| f64::from_le_bytes(bytes))
            .collect())
    }

    /// Every rank's integer, in the order of ranks.
    fn gather_i64(&self, label: &str, value: i64) -> Result<Vec<i64>, ZeroError> {
        let all = self
            .gather_bytes(label, value.to_le_bytes().to_vec())?
            .concat();
        Ok(all
            .as_chunks()
            .0
            .iter()
            .map(|&bytes| i64::from_le_bytes(bytes))
            .collect())
    }

    /// The smallest number, or NaN if a rank has NaN.
    fn agree_min(&self, label: &str, value: f64) -> Result<f64, ZeroError> {
        Ok(fold(&self.gather_f64(label, value)?, f64::min))
    }

    /// The largest number, or NaN if a rank has NaN.
    fn agree_max(&self, label: &str, value: f64) -> Result<f64, ZeroError> {
        Ok(fold(&self.gather_f64(label, value)?, f64::max))
    }

    /// The sum, added in the order of ranks.
    fn agree_sum(&self, label: &str, value: f64) -> Result<f64, ZeroError> {
        Ok(fold(&self.gather_f64(label, value)?, |a, b| a + b))
    }

    /// The smallest integer.
    fn agree_min_i64(&self, label: &str, value: i64) -> Result<i64, ZeroError> {
        Ok(self
            .gather_i64(label, value)?
            .into_iter()
            .min()
            .unwrap_or(value))
    }

    /// The largest integer.
    fn agree_max_i64(&self, label: &str, value: i64) -> Result<i64, ZeroError> {
        Ok(self
            .gather_i64(label, value)?
            .into_iter()
            .max()
            .unwrap_or(value))
    }

    /// Refuses to go on unless all ranks have the same text, such as their settings.
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

fn fold(values: &[f64], join: impl Fn(f64, f64) -> f64) -> f64 {
    values
        .iter()
        .copied()
        .reduce(|a, b| {
            if a.is_nan() || b.is_nan() {
                f64::NAN
            } else {
                join(a, b)
            }
        })
        .unwrap_or(f64::NAN)
}
