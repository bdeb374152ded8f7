//! Reads of what a scope offloads: one transaction a device, by views that belong to the stream on
//! which this thread's [reader](burn_decorator::on_reader) reads.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use burn_backend::ops::TransactionPrimitive;
use burn_backend::{Backend, StreamId, TensorData, read_sync};
use burn_decorator::{
    ReadError, finish_reads, in_shape, on_reader, reading_stream, shared, wait_for_read,
};

use crate::node::kind::Value;

pub use burn_decorator::ReadsInPlace;

/// What a read gave: the data, whose clones share one allocation, or why it could not be read.
pub(crate) type Read = Result<TensorData, ReadError>;

/// Tensors of one device that are read in one transaction: some backends read all by the first
/// one's device.
struct Batch<B: Backend>(Vec<(Value<B>, SyncSender<Read>)>);

/// A [`Batch`] of any backend.
trait AnyBatch: Any {
    fn job(self: Box<Self>) -> Box<dyn FnOnce() + Send>;
}

thread_local! {
    /// The batches to read when the scope ends.
    static BATCHES: RefCell<Vec<Box<dyn AnyBatch>>> = const { RefCell::new(Vec::new()) };
}

/// Reads a tensor with the next batch.
pub(crate) fn add<B: Backend>(value: &Value<B>) -> Receiver<Read> {
    let (sender, receiver) = sync_channel(1);
    let read = (value.clone(), sender);
    BATCHES.with_borrow_mut(|batches| {
        for batch in batches.iter_mut() {
            let batch: &mut dyn Any = &mut **batch;
            if let Some(Batch::<B>(reads)) = batch.downcast_mut()
                && reads[0].0.device() == value.device()
            {
                return reads.push(read);
            }
        }
        batches.push(Box::new(Batch(vec![read])));
    });
    receiver
}

/// Starts the reads that were added.
pub(crate) fn start() {
    let stream = reading_stream(StreamId::current());
    for batch in BATCHES.take() {
        on_reader(stream.executes(|| batch.job()));
    }
}

/// Waits for all reads that this thread started.
pub(crate) fn finish() {
    start();
    finish_reads();
}

impl<B: Backend> AnyBatch for Batch<B> {
    fn job(self: Box<Self>) -> Box<dyn FnOnce() + Send> {
        let mut reads = self.0;
        reads.sort_by_key(|(value, _)| place(value));
        let several = matches!(reads.get(1), Some((value, _)) if !matches!(value, Value::Quant(_)));
        let viewed = |(value, sender): (Value<B>, _)| ((value.shape(), sender), value.view());
        let (senders, views): (Vec<_>, Vec<_>) = reads.into_iter().map(viewed).unzip();
        // The job polls a single read for what the transaction leaves out, and for all if it fails:
        // it does not report what failed.
        let together = several.then(|| transaction(&views));
        let reads = senders.into_iter().zip(views);
        let downloads: Vec<_> = reads
            .filter_map(|(sender, view)| Some((view.download()?, sender)))
            .collect();
        Box::new(move || {
            let read = || read_sync(together?);
            let mut all = catch_unwind(AssertUnwindSafe(read)).ok().flatten();
            for (download, (shape, sender)) in downloads {
                let data = match all.as_mut().and_then(Iterator::next) {
                    Some(data) => Ok(data),
                    None => wait_for_read(download),
                };
                // The tensor may have been dropped meanwhile.
                let _ = sender.send(data.map(|data| {
                    // An upload consumes data, and the copy must outlive a failed upload.
                    shared(in_shape(data, shape))
                }));
            }
        })
    }
}

/// The order of the kinds in the data of a transaction. Quantized tensors are last: some backends
/// leave them out, so they are read singly.
fn place<B: Backend>(value: &Value<B>) -> usize {
    match value {
        Value::Float(_) => 0,
        Value::Int(_) => 1,
        Value::Bool(_) => 2,
        Value::Quant(_) | Value::Many(_) | Value::Absent => 3,
    }
}

/// The data of all of these; `None` if any cannot be read.
fn transaction<B: Backend>(
    values: &[Value<B>],
) -> impl Future<Output = Option<impl Iterator<Item = TensorData> + use<B>>> + Send + use<B> {
    let mut all = TransactionPrimitive::<B>::new(vec![], vec![], vec![], vec![]);
    for value in values {
        match value.clone() {
            Value::Float(x) => all.read_floats.push(x),
            Value::Int(x) => all.read_ints.push(x),
            Value::Bool(x) => all.read_bools.push(x),
            Value::Quant(_) | Value::Many(_) | Value::Absent => {}
        }
    }
    let read = B::tr_execute(all);
    async move {
        let data = read.await.ok()?;
        let floats = data.read_floats.into_iter();
        Some(floats.chain(data.read_ints).chain(data.read_bools))
    }
}
