//! Reads to the host that the thread which trains does not wait for.
//!
//! cubecl-cuda and cubecl-hip wait for the device at the first poll of a read, so a thread that
//! trains polls none: each such thread has a reader, a second thread, which polls its reads one
//! after the other. What is read is a view that belongs to the [`reading_stream`], so that it does
//! not depend on the time of the read what Fusion fuses together.

use core::cell::{Cell, OnceCell};
use core::fmt;
use core::future::Future;
use core::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use burn_backend::ops::TransactionPrimitive;
use burn_backend::tensor::FloatTensor;
use burn_backend::{
    Backend, ExecutionError, Shape, StreamId, TensorData, TensorMetadata, read_sync,
};

use crate::{in_shape, reading_stream};

/// What a read gave: the elements, or why they could not be read.
pub type Read = Result<TensorData, ReadError>;

/// Why a tensor could not be read to the host.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReadError {
    /// The backend returned an error, with its text.
    Backend(String),
    /// The backend panicked.
    Panicked,
    /// The thread that reads ended before the read.
    Ended,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backend(reason) => f.write_str(reason),
            Self::Panicked => f.write_str("the backend panicked"),
            Self::Ended => f.write_str("the thread that reads it has ended"),
        }
    }
}

impl core::error::Error for ReadError {}

type Job = Box<dyn FnOnce() + Send>;

/// Who does a thread's reads.
enum Reader {
    /// A thread of its own.
    Thread(Sender<Job>),
    /// The thread that trains, because the system has no thread more.
    Trainer,
}

thread_local! {
    static READER: OnceCell<Reader> = const { OnceCell::new() };
    /// The number of this thread's [`ReadsInPlace`] guards.
    static IN_PLACE: Cell<usize> = const { Cell::new(0) };
}

/// Runs `job` on this thread's reader, on this thread's [`reading_stream`], after the jobs before
/// it; at once on this thread while it [`ReadsInPlace`]. The reader is a thread `burn reads`, which
/// starts with the first job and ends after the last one when this thread has ended. A panic of a
/// job ends that job only. Where the system has no thread for the reader, this thread runs its jobs
/// at once, and says so once: training goes on, slower on a GPU.
pub fn on_reader(job: impl FnOnce() + Send + 'static) {
    let stream = reading_stream(StreamId::current());
    let job = move || stream.executes(job);
    if IN_PLACE.get() > 0 {
        return run(job);
    }
    READER.with(|reader| match reader.get_or_init(start_reader) {
        Reader::Thread(sender) => {
            let sent = sender.send(Box::new(job));
            sent.expect("a reader catches panics, and ends with the thread that it reads for");
        }
        Reader::Trainer => run(job),
    });
}

fn start_reader() -> Reader {
    let (sender, jobs) = channel::<Job>();
    let read_all = move || {
        for job in jobs {
            run(job);
        }
    };
    let named = std::thread::Builder::new().name("burn reads".to_owned());
    match named.spawn(read_all) {
        Ok(_) => Reader::Thread(sender),
        Err(error) => {
            crate::warn_user!(
                "no thread for reads to the host ({error}): the thread that trains waits for each"
            );
            Reader::Trainer
        }
    }
}

/// Runs a job, which reports what failed itself: whoever waits for one that panicked finds its
/// sender gone.
fn run(job: impl FnOnce()) {
    let _ = catch_unwind(AssertUnwindSafe(job));
}

/// Waits for all jobs that this thread has given to its [reader](on_reader).
pub fn finish_reads() {
    let (done, wait) = channel::<()>();
    if READER.with(|reader| reader.get().is_some()) {
        on_reader(move || drop(done));
        // Returns with an error once the job drops `done`: nothing is sent.
        let _ = wait.recv();
    }
}

/// Waits for a read, on the thread that calls it, and catches a panic of the backend.
///
/// # Errors
///
/// [`ReadError::Backend`], [`ReadError::Panicked`].
pub fn wait_for_read<T>(
    read: impl Future<Output = Result<T, ExecutionError>>,
) -> Result<T, ReadError> {
    match catch_unwind(AssertUnwindSafe(|| read_sync(read))) {
        Ok(Ok(data)) => Ok(data),
        Ok(Err(error)) => Err(ReadError::Backend(error.to_string())),
        Err(_) => Err(ReadError::Panicked),
    }
}

/// The shape of a view on which a read starts: a backend may skip a reshape to the same shape, so
/// it has a leading dimension of one.
pub fn view_shape(shape: &Shape) -> Shape {
    Shape::from_iter(core::iter::once(1).chain(shape.iter().copied()))
}

/// A float tensor that is being copied to the host. The device holds it until it is copied.
///
/// ```
/// use burn_backend::TensorData;
/// use burn_backend::ops::FloatTensorOps;
/// use burn_decorator::HostRead;
/// use burn_flex::Flex;
///
/// let elements = TensorData::from([[1.0f32, 2.0], [3.0, 4.0]]);
/// let read = HostRead::start::<Flex>(Flex::float_from_data(elements.clone(), &Default::default()));
/// assert_eq!(read.wait(), Ok(elements));
/// ```
#[derive(Debug)]
pub struct HostRead(Progress);

#[derive(Debug)]
enum Progress {
    Underway(Receiver<Read>),
    Over(Read),
}

impl HostRead {
    /// Starts the copy, [on this thread's reader](on_reader), and does not wait.
    ///
    /// # Cost
    ///
    /// A view, which runs this thread's queue on Fusion, and a message to the reader.
    pub fn start<B: Backend>(tensor: FloatTensor<B>) -> Self {
        let shape = tensor.shape();
        // Decorators bring their tensors back when the read is made: on this thread.
        let read = reading_stream(StreamId::current())
            .executes(|| B::float_into_data(B::float_reshape(tensor, view_shape(&shape))));
        Self::of(async move { Ok(in_shape(read.await?, shape)) })
    }

    /// Starts the copies of several tensors as one read, which waits for the device once: see
    /// [`start`](Self::start). None of them is there before all are.
    pub fn start_together<B: Backend>(tensors: Vec<FloatTensor<B>>) -> Vec<Self> {
        // CubeCL has no transaction of nothing.
        if tensors.is_empty() {
            return Vec::new();
        }
        let shapes: Vec<Shape> = tensors.iter().map(TensorMetadata::shape).collect();
        let read = reading_stream(StreamId::current()).executes(|| {
            let views = tensors.into_iter().zip(&shapes);
            let views = views.map(|(tensor, shape)| B::float_reshape(tensor, view_shape(shape)));
            let views = views.collect();
            B::tr_execute(TransactionPrimitive::new(views, vec![], vec![], vec![]))
        });
        let (mut senders, mut reads) = (Vec::new(), Vec::new());
        for _ in &shapes {
            let (sender, receiver): (SyncSender<Read>, _) = sync_channel(1);
            senders.push(sender);
            reads.push(Self(Progress::Underway(receiver)));
        }
        on_reader(move || {
            // Whoever started them may not want them any more.
            match wait_for_read(read) {
                Ok(data) => {
                    let read = data.read_floats.into_iter().zip(shapes);
                    for (sender, (data, shape)) in senders.into_iter().zip(read) {
                        let _ = sender.send(Ok(in_shape(data, shape)));
                    }
                }
                Err(error) => {
                    for sender in senders {
                        let _ = sender.send(Err(error.clone()));
                    }
                }
            }
        });
        reads
    }

    /// Waits for a read [on this thread's reader](on_reader), and not here. It reads what belongs
    /// to the [`reading_stream`].
    pub fn of(
        read: impl Future<Output = Result<TensorData, ExecutionError>> + Send + 'static,
    ) -> Self {
        let (sender, receiver): (SyncSender<Read>, _) = sync_channel(1);
        on_reader(move || {
            // Whoever started it may not want it any more.
            let _ = sender.send(wait_for_read(read));
        });
        Self(Progress::Underway(receiver))
    }

    /// Of elements that are in host memory already.
    pub fn from_host(data: TensorData) -> Self {
        Self(Progress::Over(Ok(data)))
    }

    /// The same copy, complete.
    #[must_use]
    pub fn arrived(self) -> Self {
        Self(Progress::Over(self.wait()))
    }

    /// Waits for the elements, in their own type.
    ///
    /// # Errors
    ///
    /// What kept them from being read.
    pub fn wait(self) -> Read {
        match self.0 {
            Progress::Over(read) => read,
            Progress::Underway(receiver) => receiver.recv().unwrap_or(Err(ReadError::Ended)),
        }
    }
}

/// While it lives, this thread itself reads what it else gives to its [reader](on_reader), at once:
/// for backends with tensors in host memory, where a second thread would only make the time of each
/// release vary.
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use burn_backend::ops::FloatTensorOps;
    use burn_flex::Flex;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn jobs_run_in_order_on_one_thread_of_their_own() {
        let (sender, ran) = channel();
        for job in 0..8 {
            let sender = sender.clone();
            on_reader(move || sender.send((job, thread::current().id())).unwrap());
        }
        finish_reads();
        let ran: Vec<_> = ran.try_iter().collect();
        let jobs: Vec<_> = ran.iter().map(|(job, _)| *job).collect();
        assert_eq!(jobs, [0, 1, 2, 3, 4, 5, 6, 7]);
        let own = thread::current().id();
        assert!(ran.iter().all(|(_, by)| *by == ran[0].1 && *by != own));
    }

    #[test]
    fn a_job_that_panics_ends_neither_the_reader_nor_the_jobs_after_it() {
        on_reader(|| panic!("the device is gone"));
        let (sender, ran) = channel();
        on_reader(move || sender.send(()).unwrap());
        assert_eq!(ran.recv_timeout(PATIENCE), Ok(()));
    }

    #[test]
    fn tensors_that_are_read_together_keep_their_shapes_and_order() {
        let data = [
            TensorData::from([[1.0f32, 2.0], [3.0, 4.0]]),
            TensorData::from([5.0f32]),
        ];
        let tensors = data
            .iter()
            .map(|data| Flex::float_from_data(data.clone(), &Default::default()));
        let reads = HostRead::start_together::<Flex>(tensors.collect());
        let read: Vec<Read> = reads.into_iter().map(HostRead::wait).collect();
        assert_eq!(read, data.map(Ok));
        assert!(HostRead::start_together::<Flex>(Vec::new()).is_empty());
    }

    #[test]
    fn the_reader_reads_all_and_ends_when_its_thread_ends() {
        /// Tells when it is dropped.
        struct Guard(Sender<&'static str>);
        impl Drop for Guard {
            fn drop(&mut self) {
                let _ = self.0.send("the reader has ended");
            }
        }
        thread_local! {
            static OF_READER: Cell<Option<Guard>> = const { Cell::new(None) };
        }
        let (sender, told) = channel();
        thread::spawn(move || {
            let name = |thread: thread::Thread| thread.name().map(str::to_owned);
            let first = sender.clone();
            on_reader(move || {
                assert_eq!(name(thread::current()).as_deref(), Some("burn reads"));
                OF_READER.set(Some(Guard(first)));
                thread::sleep(Duration::from_millis(50));
            });
            on_reader(move || sender.send("the last job has run").unwrap());
        });
        let told: Vec<_> = (0..2)
            .map(|_| told.recv_timeout(PATIENCE).expect("it ends"))
            .collect();
        assert_eq!(told, ["the last job has run", "the reader has ended"]);
    }

    #[test]
    fn in_place_a_job_runs_at_once_on_the_same_thread() {
        let outer = ReadsInPlace::on();
        drop(ReadsInPlace::on());
        let (own, stream) = (thread::current().id(), StreamId::current());
        let (sender, ran) = channel();
        on_reader(move || {
            let found = (thread::current().id(), StreamId::current());
            sender.send(found).unwrap();
        });
        assert_eq!(ran.try_recv(), Ok((own, reading_stream(stream))));
        drop(outer);
        let (sender, ran) = channel();
        on_reader(move || sender.send(thread::current().id()).unwrap());
        assert_ne!(ran.recv_timeout(PATIENCE), Ok(own));
    }
}
