//! Bytes that a rank sends and receives.

use std::{ops::Range, sync::Arc};

/// The buffer of which a rank sends parts: shared, so that ranks that are threads read it without a
/// copy.
pub(super) type Payload = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// What a rank has received from another.
pub(super) struct Part(pub Payload, pub Range<usize>);

impl Part {
    pub fn bytes(&self) -> &[u8] {
        &(*self.0).as_ref()[self.1.clone()]
    }
}
