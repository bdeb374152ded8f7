//! Ranks that go on together or not at all.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::RecordError;

/// Who else saves or loads, and a way to ask them.
pub trait Coordinator {
    /// This rank.
    fn rank(&self) -> usize;
    /// Ranks there are.
    fn world_size(&self) -> usize;
    /// The message of every rank, by rank.
    fn gather(&self, mine: &[u8])
    -> Result<Vec<Vec<u8>>, Box<dyn std::error::Error + Send + Sync>>;
}

/// What every rank has, by rank, or an error on every rank if one has failed: on that rank its own, on the others one that
/// names it. Every rank comes here whatever has happened to it, so that none waits for one that gave up.
pub(super) fn agree<T: Serialize + DeserializeOwned>(
    group: &dyn Coordinator,
    mine: Result<T, RecordError>,
) -> Result<Vec<T>, RecordError> {
    let message = mine.as_ref().map_err(ToString::to_string);
    let message = serde_json::to_vec(&message).map_err(|error| RecordError::Group(error.into()));
    let gathered = message.and_then(|message| group.gather(&message).map_err(RecordError::Group));
    mine?;
    let mut all = Vec::with_capacity(group.world_size());
    for (rank, message) in gathered?.iter().enumerate() {
        let theirs: Result<T, String> =
            serde_json::from_slice(message).map_err(|error| RecordError::Group(error.into()))?;
        all.push(theirs.map_err(|message| RecordError::OtherRank { rank, message })?);
    }
    Ok(all)
}
