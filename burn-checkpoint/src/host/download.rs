//! Reads of what a scope offloads: one transaction a device, by views that belong to the stream on
//! which this thread's [reader](burn_decorator::on_reader) reads.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use burn_backend::ops::TransactionPrimitive;
use burn_backend::{Backend, Shape, StreamId, TensorData, read_sync};
use burn_decorator::{
    ReadError, finish_reads, in_shape, on_reader, reading_stream, shared, wait_for_read,
};

use crate::node::kind::{Download, Value};

pub use burn_decorator::ReadsInPlace;

/// What a read gave: the data, whose clones share one allocation, or why it could not be read.
pub(crate) type Read = Result<TensorData, ReadError>;

/// Tensors of one device that are read in one transaction: some backends read all by the first
/// one's device.
struct Batch<B: Backend>(Vec<BatchRead<B>>);

/// One of these tensors.
struct BatchRead<B: Backend> {
    value: Value<B>,
    shape: Shape,
    sender: SyncSender<Read>,
}

/// A read that goes on.
struct StartedRead {
    download: Download,
    shape: Shape,
    sender: SyncSender<Read>,
}

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
    let read = BatchRead {
        value: value.clone(),
        shape: value.shape(),
        sender,
    };
    BATCHES.with_borrow_mut(|batches| {
        for batch in batches.iter_mut() {
            let batch: &mut dyn Any = &mut **batch;
            if let Some(Batch::<B>(reads)) = batch.downcast_mut()
                && reads[0].value.device() == value.device()
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
        reads.sort_by_key(|read| place(&read.value));
        let views: Vec<_> = reads.into_iter().map(BatchRead::view).collect();
        let second = views.get(1);
        let several = second.is_some_and(|read| !matches!(read.value, Value::Quant(_)));
        // The job polls a single read for what the transaction leaves out, and for all if it fails:
        // it does not report what failed.
        let together = several.then(|| transaction(&views));
        let started: Vec<_> = views.into_iter().filter_map(BatchRead::start).collect();
        Box::new(move || {
            let read = || read_sync(together?);
            let mut all = catch_unwind(AssertUnwindSafe(read)).ok().flatten();
            for read in started {
                let data = match all.as_mut().and_then(Iterator::next) {
                    Some(data) => Ok(data),
                    None => wait_for_read(read.download),
                };
                // The tensor may have been dropped meanwhile.
                let _ = read.sender.send(data.map(|data| {
                    // An upload consumes data, and the copy must outlive a failed upload.
                    shared(in_shape(data, read.shape))
                }));
            }
        })
    }
}

impl<B: Backend> BatchRead<B> {
    /// That of a view of the tensor.
    fn view(self) -> Self {
        Self {
            value: self.value.view(),
            ..self
        }
    }

    /// Starts the read; `None` if there is nothing to read.
    fn start(self) -> Option<StartedRead> {
        Some(StartedRead {
            download: self.value.download()?,
            shape: self.shape,
            sender: self.sender,
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
    reads: &[BatchRead<B>],
) -> impl Future<Output = Option<impl Iterator<Item = TensorData> + use<B>>> + Send + use<B> {
    let mut all = TransactionPrimitive::<B>::new(vec![], vec![], vec![], vec![]);
    for read in reads {
        match read.value.clone() {
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
