//! Event files of TensorBoard.
//!
//! A file is a sequence of records: the length, its checksum, a message, its checksum
//! (`tensorflow/core/lib/io/record_writer.h`). A message is an `Event` of
//! `tensorflow/core/util/event.proto`, in protobuf's wire format.

use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use fs_err::{self as fs, File};

/// A file that TensorBoard finds in its directory.
pub struct EventFile(BufWriter<File>);

impl EventFile {
    /// A new file in a directory, which is made if it is missing.
    ///
    /// # Errors
    ///
    /// The directory or the file cannot be made or written.
    pub fn create(directory: &Path) -> io::Result<Self> {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        fs::create_dir_all(directory)?;
        let [seconds, process] = [now() as u64, u64::from(std::process::id())];
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("events.out.tfevents.{seconds}.burn.{process}.{number}");
        let mut file = BufWriter::new(File::create_new(directory.join(name))?);
        file.write_all(&record(&version(now())))?;
        file.flush()?;
        Ok(Self(file))
    }

    /// Writes a point of each named curve.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn scalars<'a>(
        &mut self,
        step: u64,
        values: impl IntoIterator<Item = (&'a str, f64)>,
    ) -> io::Result<()> {
        self.0.write_all(&record(&scalars(now(), step, values)))
    }

    /// Writes buffered points to the file, where TensorBoard reads them.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

fn record(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    let [of_length, of_message] = [&length, message].map(|bytes| masked(crc32c::crc32c(bytes)));
    let parts = [&length, &of_length.to_le_bytes()[..], message];
    [parts.concat(), of_message.to_le_bytes().to_vec()].concat()
}

/// A checksum as it is stored: `mask` of `tensorflow/core/lib/hash/crc32c.h`.
fn masked(crc: u32) -> u32 {
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The first `Event` of a file.
fn version(time: f64) -> Vec<u8> {
    let mut event = double(1, time);
    event.extend(bytes(3, b"brain.Event:2"));
    event
}

/// An `Event` with a `Summary` of one `Value` a curve.
fn scalars<'a>(time: f64, step: u64, values: impl IntoIterator<Item = (&'a str, f64)>) -> Vec<u8> {
    let values = values.into_iter().flat_map(|(name, value)| {
        let value = [bytes(1, name.as_bytes()), float(2, value as f32)].concat();
        bytes(1, &value)
    });
    let summary: Vec<u8> = values.collect();
    [double(1, time), varint(2, step), bytes(5, &summary)].concat()
}

/// A field of type `double`.
fn double(field: u8, value: f64) -> Vec<u8> {
    [&[field << 3 | 1], &value.to_le_bytes()[..]].concat()
}

/// A field of type `float`.
fn float(field: u8, value: f32) -> Vec<u8> {
    [&[field << 3 | 5], &value.to_le_bytes()[..]].concat()
}

/// A field of type `int64`.
fn varint(field: u8, value: u64) -> Vec<u8> {
    let mut encoded = vec![field << 3];
    encoded.extend(base128(value));
    encoded
}

/// A field of type `string` or of a message.
fn bytes(field: u8, value: &[u8]) -> Vec<u8> {
    let mut encoded = vec![field << 3 | 2];
    encoded.extend(base128(value.len() as u64));
    encoded.extend(value);
    encoded
}

/// Seven bits a byte, the lowest first, each byte but the last with its high bit set.
fn base128(mut value: u64) -> Vec<u8> {
    let mut encoded = Vec::new();
    while value >= 0x80 {
        encoded.push(value as u8 | 0x80);
        value >>= 7;
    }
    encoded.push(value as u8);
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What TensorBoard's `RecordWriter` writes for the same events.
    #[test]
    fn the_bytes_are_those_of_tensorboard() {
        let values = [("Loss", 0.25), ("Learning Rate", 1e-3)];
        let found = [record(&version(1.5)), record(&scalars(2.5, 300, values))].concat();
        let hex: String = found.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            hex,
            "1800000000000000a37f4b2209000000000000f83f1a0d627261696e2e4576656e743a322a28646c\
             31000000000000009d8383e909000000000000044010ac022a230a0b0a044c6f7373150000803e0a\
             140a0d4c6561726e696e672052617465156f12833a121b560f"
        );
    }
}
