//! A decorator from the same table that behaves as the queue of a device: it counts what the host
//! launches and reads, and answers reads late where a test wants it.
//!
//! Everything is kept by stream, because a read may be done by another thread, under the stream of
//! the one that trains or the one that reads for it.

use std::collections::{BTreeMap, HashMap};
use std::future::{Future, poll_fn};
use std::marker::PhantomData;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use burn_backend::{Backend, BackendTypes, StreamId};
use burn_decorator::types::*;
use burn_decorator::{kind_type, reading_stream};

/// A backend that counts launches and reads, and holds reads back.
#[derive(Clone, Copy, Debug, Default)]
pub struct Queue<B>(PhantomData<B>);

/// What the host launched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Operations that launch a kernel where nothing is fused: all but views, uploads and queries.
    pub launches: u64,
    /// The same by operation.
    pub by_operation: BTreeMap<&'static str, u64>,
}

/// When a read is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Answers {
    /// At once.
    #[default]
    AtOnce,
    /// So long after the first poll, which returns at once, as in cubecl-wgpu.
    Later(Duration),
    /// So long after the first poll, which waits, as in cubecl-cuda and cubecl-hip.
    LaterAndBlock(Duration),
    /// The first so many reads of the stream at once, further ones not before this changes; the
    /// first poll waits. Where the host waits for one of those, it panics instead of hanging.
    First(u64),
    /// Each read not before so many launches since [`take_counts`]; the first poll waits. Where the
    /// host waits for one before it launches those, the read panics instead of hanging.
    Launched(u64),
    /// Never: each read panics, as that of a device which is lost.
    Never,
}

#[derive(Default)]
struct Stream {
    counts: Counts,
    /// Reads so far.
    reads: u64,
    /// The threads that polled reads since they were last taken.
    readers: Vec<ThreadId>,
    answers: Answers,
}

static STREAMS: Mutex<Option<HashMap<StreamId, Stream>>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();

/// A held read that nobody answers in this time is one that the host waits for.
const PATIENCE: Duration = Duration::from_secs(10);

fn streams() -> MutexGuard<'static, Option<HashMap<StreamId, Stream>>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The stream of the thread that trains.
fn training_stream() -> StreamId {
    let current = StreamId::current();
    current.min(reading_stream(current))
}

fn with<R>(f: impl FnOnce(&mut Stream) -> R) -> R {
    let mut streams = streams();
    f(streams
        .get_or_insert_default()
        .entry(training_stream())
        .or_default())
}

/// What the host launched on this thread's stream since the last call of this function.
pub fn take_counts() -> Counts {
    with(|stream| core::mem::take(&mut stream.counts))
}

/// The reads on this thread's stream so far; a transaction is one.
pub fn reads_so_far() -> u64 {
    with(|stream| stream.reads)
}

/// The threads that polled this thread's reads since the last call of this function, by read.
pub fn take_readers() -> Vec<ThreadId> {
    with(|stream| core::mem::take(&mut stream.readers))
}

/// Chooses when reads of this thread's stream are answered from now on, those included that are
/// held.
pub fn answer_reads(answers: Answers) {
    with(|stream| stream.answers = answers);
    CHANGED.notify_all();
}

/// Counts an operation of a work class.
fn count(op: &'static str, work: &str) {
    if matches!(work, "view" | "pass") || op.ends_with("from_data") {
        return;
    }
    let awaited = with(|stream| {
        stream.counts.launches += 1;
        *stream.counts.by_operation.entry(op).or_default() += 1;
        stream.answers == Answers::Launched(stream.counts.launches)
    });
    if awaited {
        CHANGED.notify_all();
    }
}

/// Counts a read and answers it when it is time.
async fn late<T>(answer: impl Future<Output = T>) -> T {
    let (read, answers) = with(|stream| {
        stream.reads += 1;
        stream.readers.push(std::thread::current().id());
        (stream.reads, stream.answers)
    });
    match answers {
        Answers::AtOnce => {}
        Answers::LaterAndBlock(delay) => std::thread::sleep(delay),
        Answers::Later(delay) => {
            let ready = Instant::now() + delay;
            poll_fn(|context| match Instant::now() < ready {
                true => {
                    context.waker().wake_by_ref();
                    std::thread::yield_now();
                    Poll::Pending
                }
                false => Poll::Ready(()),
            })
            .await;
        }
        Answers::First(_) | Answers::Launched(_) => wait_for_turn(read),
        Answers::Never => panic!("the device is lost"),
    }
    answer.await
}

fn wait_for_turn(read: u64) {
    let id = training_stream();
    let is_held = |all: &mut Option<HashMap<StreamId, Stream>>| {
        let stream = all.as_ref().and_then(|all| all.get(&id));
        stream.is_some_and(|stream| match stream.answers {
            Answers::First(reads) => reads < read,
            Answers::Launched(launches) => stream.counts.launches < launches,
            _ => false,
        })
    };
    let (all, timeout) = CHANGED
        .wait_timeout_while(streams(), PATIENCE, is_held)
        .unwrap_or_else(PoisonError::into_inner);
    drop(all);
    assert!(!timeout.timed_out(), "the host waits for read {read}");
}

impl<B: Backend> BackendTypes for Queue<B> {
    burn_decorator::forward_types!(B, float tensor: B::FloatTensorPrimitive);
}

impl<B: Backend> Backend for Queue<B> {
    burn_decorator::forward_device!(B);
    burn_decorator::forward_dtypes!(B);

    fn name(device: &Self::Device) -> String {
        format!("queue<{}>", B::name(device))
    }
}

macro_rules! answer {
    (Data $x:expr) => {
        late($x)
    };
    (TransactionData $x:expr) => {
        late($x)
    };
    ($kind:tt $x:expr) => {
        $x
    };
}

macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for Queue<B> {
            $(fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
                count(stringify!($op), stringify!($work));
                answer!($ret retype!($ret B, Self, B::$op($(retype!($kind Self, B, $arg)),*)))
            })*
        }
    };
}

burn_decorator::every_ops!(implement);
