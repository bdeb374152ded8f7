//! Streams to read on.

use burn_backend::StreamId;

/// The stream that another thread reads on what `stream` computes; its own inverse.
///
/// A read on Fusion first runs what the tensor's stream has queued. If another thread does that on
/// the stream of the one that trains, it depends on the time of the read what is fused together,
/// and so are last bits. An operation on the reading stream, such as a reshape to another shape,
/// runs the queue of its operand's stream when it is called, and the read of its result leaves that
/// stream alone.
///
/// ```
/// use burn_backend::StreamId;
/// use burn_decorator::reading_stream;
///
/// let training = StreamId::current();
/// assert_ne!(reading_stream(training), training); // streams are counted from zero, so no thread has it
/// assert_eq!(reading_stream(reading_stream(training)), training);
/// ```
pub fn reading_stream(stream: StreamId) -> StreamId {
    StreamId {
        value: !stream.value,
    }
}
