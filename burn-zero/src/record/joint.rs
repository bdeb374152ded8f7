//! Operations that succeed on all ranks or fail on all.

use core::fmt::Display;

use burn_ranks::ProcessGroup;
use serde::{Serialize, de::DeserializeOwned};

use super::RecordFault;
use crate::error::ZeroError;

/// The values of all ranks, by rank; or an error on every rank if one has failed: on that rank its
/// own, on the others one that names the rank. Collective: every rank calls it after its work, also
/// after an error.
pub(crate) fn share<T: Serialize + DeserializeOwned>(
    group: &dyn ProcessGroup,
    label: &str,
    own: Result<T, impl Into<ZeroError> + Display>,
) -> Result<Vec<T>, ZeroError> {
    let ended = own.as_ref().map_err(ToString::to_string);
    let bytes = serde_json::to_vec(&ended).expect("values for ranks are JSON");
    let all = group.gather_bytes(label, bytes);
    own.map_err(Into::into)?; // takes precedence over a lost group
    let read = |(rank, bytes): (usize, &Vec<u8>)| {
        let ended: Result<T, String> =
            serde_json::from_slice(bytes).expect("ranks run the same program");
        ended.map_err(|message| RecordFault::OtherRank { rank, message }.into())
    };
    all?.iter().enumerate().map(read).collect()
}

/// [`share`] for a value that stays on this rank.
pub(crate) fn end<T>(
    group: &dyn ProcessGroup,
    label: &str,
    own: Result<T, impl Into<ZeroError> + Display>,
) -> Result<T, ZeroError> {
    let mut value = None;
    share(group, label, own.map(|own| value = Some(own)))?;
    Ok(value.expect("this rank succeeded if all did"))
}
