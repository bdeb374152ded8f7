//! Bytes as readable text.

/// A binary unit of bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Unit {
    pub name: &'static str,
    pub bytes: f64,
}

impl Unit {
    /// The unit for an axis up to so many bytes: MiB, unless that would give tiny or huge numbers.
    pub fn for_axis(most_bytes: u64) -> Self {
        let (name, shift) = match most_bytes {
            ..0x10_0000 => ("KiB", 10),
            0x10_0000..0x10_0000_0000 => ("MiB", 20),
            _ => ("GiB", 30),
        };
        Self {
            name,
            bytes: (1_u64 << shift) as f64,
        }
    }

    pub fn of(self, bytes: u64) -> f64 {
        bytes as f64 / self.bytes
    }

    /// The number with its unit, with about three digits.
    pub fn text(self, bytes: u64) -> String {
        let number = self.of(bytes);
        let digits = match number {
            100.0.. => 0,
            10.0.. => 1,
            _ => 2,
        };
        format!("{number:.digits$} {}", self.name)
    }
}
