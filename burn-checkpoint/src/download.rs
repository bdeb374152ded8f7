//! Reads to the host, on a thread of their own.
//!
//! cubecl-cuda and cubecl-hip wait for the device at the first poll of a read, so a training thread polls none: a second thread of
//! its own reads the tensors that a scope offloads, as one transaction a device, by views that belong to the [`reading_stream`].

use std::any::Any;
use std::cell::{Cell, OnceCell, RefCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use burn_backend::ops::TransactionPrimitive;
use burn_backend::{Backend, Bytes, Shape, StreamId, TensorData, read_sync};
use burn_decorator::reading_stream;

use crate::kind::Value;

/// What a read gave: the data, whose clones share one allocation, or why it could not be read.
pub(crate) type Read = Result<TensorData, String>;

/// Tensors of one device that are read in one transaction: some backends read all by the first one's device.
struct Batch<B: Backend>(Vec<(Value<B>, SyncSender<Read>)>);

/// A [`Batch`] of any backend.
trait AnyBatch: Any {
    fn job(self: Box<Self>) -> Job;
}

type Job = Box<dyn FnOnce() + Send>;

thread_local! {
    /// The batches to read when the scope ends.
    static BATCHES: RefCell<Vec<Box<dyn AnyBatch>>> = const { RefCell::new(Vec::new()) };
    static READER: OnceCell<Sender<Job>> = const { OnceCell::new() };
    /// The number of this thread's [`ReadsInPlace`] guards.
    static IN_PLACE: Cell<usize> = const { Cell::new(0) };
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
        run(stream.executes(|| batch.job()));
    }
}

/// Waits for all reads that this thread started.
pub(crate) fn finish() {
    start();
    let (done, wait) = channel::<()>();
    if READER.with(|reader| reader.get().is_some()) {
        run(Box::new(move || drop(done)));
        // Returns with an error once the job drops `done`: nothing is sent.
        let _ = wait.recv();
    }
}

/// Runs a job on this thread's reader, after those before it.
fn run(job: Job) {
    if IN_PLACE.get() > 0 {
        return job();
    }
    let stream = reading_stream(StreamId::current());
    let job: Job = Box::new(move || stream.executes(job));
    READER.with(|reader| {
        let sender = reader.get_or_init(|| {
            let (sender, jobs) = channel::<Job>();
            let work = move || jobs.into_iter().for_each(|job| job());
            let named = std::thread::Builder::new().name("burn-checkpoint reads".to_owned());
            named.spawn(work).expect("the system has threads");
            sender
        });
        sender.send(job).expect("a reader catches panics");
    });
}

impl<B: Backend> AnyBatch for Batch<B> {
    fn job(self: Box<Self>) -> Job {
        let mut reads = self.0;
        reads.sort_by_key(|(value, _)| place(value));
        let several = matches!(reads.get(1), Some((value, _)) if !matches!(value, Value::Quant(_)));
        let viewed = |(value, sender): (Value<B>, _)| ((value.shape(), sender), value.view());
        let (senders, views): (Vec<_>, Vec<_>) = reads.into_iter().map(viewed).unzip();
        // The job polls a single read for what the transaction leaves out, and for all if it fails: it does not report what failed.
        let together = several.then(|| transaction(&views));
        let reads = senders.into_iter().zip(views);
        let reads = reads.filter_map(|(sender, view)| Some((view.download()?, sender)));
        let reads: Vec<_> = reads.collect();
        Box::new(move || {
            let read = || read_sync(together?);
            let mut all = catch_unwind(AssertUnwindSafe(read)).ok().flatten();
            for (download, (shape, sender)) in reads {
                let one = || {
                    let data = match all.as_mut().and_then(Iterator::next) {
                        Some(data) => data,
                        None => read_sync(download).map_err(|error| error.to_string())?,
                    };
                    Ok(shared(data, shape))
                };
                let panicked = |_| Err("the backend panicked".to_owned());
                let read = catch_unwind(AssertUnwindSafe(one)).unwrap_or_else(panicked);
                // The tensor may have been dropped meanwhile.
                let _ = sender.send(read);
            }
        })
    }
}

/// The same data in this shape, with clones that share one allocation: an upload consumes data, and the copy must outlive a failed upload.
fn shared(data: TensorData, shape: Shape) -> TensorData {
    struct Owner(Bytes);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    let (_, dtype) = burn_decorator::shape_and_dtype!(data);
    let bytes = data.into_bytes();
    let property = bytes.property();
    let bytes = bytes::Bytes::from_owner(Owner(bytes));
    TensorData::from_bytes(Bytes::from_shared(bytes, property), shape, dtype)
}

/// The order of the kinds in the data of a transaction. Quantized tensors are last: some backends leave them out, so they are read singly.
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

/// While it lives, this thread itself reads what its scopes offload, at the end of each scope: for backends with tensors in host memory,
/// where a second thread would only make the time of each release vary.
#[derive(Debug)]
#[must_use = "ends when this is dropped"]
pub struct ReadsInPlace(PhantomData<*const ()>);

impl ReadsInPlace {
    /// Reads on this thread until the last of its guards is dropped.
    pub fn on() -> Self {
        IN_PLACE.set(IN_PLACE.get() + 1);
        Self(PhantomData)
    }
}

impl Drop for ReadsInPlace {
    fn drop(&mut self) {
        IN_PLACE.set(IN_PLACE.get() - 1);
    }
}
