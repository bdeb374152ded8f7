//! Work that takes longer than a deadline.

use std::time::Duration;

/// How often a rank at work tells those who wait for it that it is: several times in a deadline, and often enough for a failure
/// to be known soon.
pub(crate) fn round(deadline: Duration) -> Duration {
    (deadline / 4).min(Duration::from_secs(5))
}
