//! Bytes as readable text.

/// A binary unit of bytes.
#[derive(Clone, Copy)]
pub(super) struct Unit {
    pub name: &'static str,
    bytes: u64,
}

impl Unit {
    /// The unit for an axis up to so many bytes: MiB, unless that would give tiny or huge numbers.
    pub fn for_axis(most_bytes: u64) -> Self {
        let (name, bytes) = match most_bytes {
            ..0x10_0000 => ("KiB", 1 << 10),
            0x10_0000..0x10_0000_0000 => ("MiB", 1 << 20),
            _ => ("GiB", 1 << 30),
        };
        Self { name, bytes }
    }

    pub fn of(self, bytes: u64) -> f64 {
        bytes as f64 / self.bytes as f64
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
