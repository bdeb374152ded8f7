//! Bytes and seconds for people.

use std::fmt;
use std::time::{Duration, Instant};

/// How much was moved in which time.
pub(super) struct Rate {
    bytes: u64,
    time: Duration,
}

impl Rate {
    pub fn since(start: Instant, bytes: u64) -> Self {
        Self {
            bytes,
            time: start.elapsed(),
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.time.as_secs_f64();
        let megabytes = self.bytes as f64 / 1e6;
        // A time too short to measure makes no rate.
        let rate = megabytes / seconds.max(1e-9);
        write!(f, "{megabytes:.1} MB in {seconds:.2} s ({rate:.0} MB/s)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_reads_well() {
        let rate = Rate {
            bytes: 3_000_000,
            time: Duration::from_millis(1500),
        };
        assert_eq!(rate.to_string(), "3.0 MB in 1.50 s (2 MB/s)");
    }
}
