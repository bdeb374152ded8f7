//! A backend that counts the bytes of its float tensors, and notes what moves between it and the
//! host.
//!
//! It stands for a device. As on a GPU, a copy to the host takes its time: it is not there when it
//! is first asked for.

use core::fmt;
use core::future::poll_fn;
use core::task::Poll;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, TensorMetadata};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

/// Over `B`.
#[derive(Clone, Copy, Debug, Default)]
pub struct Probe<B>(PhantomData<B>);

/// What happened to float tensors, on any thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// An operation.
    Computed(&'static str),
    /// So many bytes have arrived on the host.
    Down(usize),
    /// So many bytes have left the host.
    Up(usize),
}

/// The bytes of living tensors.
#[derive(Default)]
struct Live {
    bytes: AtomicUsize,
    peak: AtomicUsize,
}

impl Live {
    const fn new() -> Self {
        Self {
            bytes: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
        }
    }

    fn add(&self, bytes: usize) {
        let live = self.bytes.fetch_add(bytes, Relaxed) + bytes;
        self.peak.fetch_max(live, Relaxed);
    }

    fn remove(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Relaxed);
    }

    fn growth<R>(&self, work: impl FnOnce() -> R) -> (usize, R) {
        let before = self.bytes.load(Relaxed);
        self.peak.store(before, Relaxed);
        let result = work();
        (self.peak.load(Relaxed) - before, result)
    }
}

static ALL: Live = Live::new();

thread_local! {
    /// Of tensors that were made on this thread.
    static OWN: Arc<Live> = Arc::default();
}

static EVENTS: Mutex<Vec<Event>> = Mutex::new(Vec::new());
static UPLOADS: Mutex<Vec<Upload>> = Mutex::new(Vec::new());

/// An upload of a float tensor.
#[allow(dead_code, reason = "not by each test")]
#[derive(Clone, Copy, Debug)]
pub struct Upload {
    /// Where its elements are on the host.
    pub address: usize,
    pub bytes: usize,
}

/// The uploads since the last call.
#[allow(dead_code, reason = "not by each test")]
pub fn take_uploads() -> Vec<Upload> {
    std::mem::take(&mut UPLOADS.lock().unwrap())
}

/// The events since the last call.
pub fn take_events() -> Vec<Event> {
    std::mem::take(&mut EVENTS.lock().unwrap())
}

/// All bytes that went down, and up.
pub fn moved(events: &[Event]) -> (usize, usize) {
    events.iter().fold((0, 0), |(down, up), event| match event {
        Event::Down(bytes) => (down + bytes, up),
        Event::Up(bytes) => (down, up + bytes),
        Event::Computed(_) => (down, up),
    })
}

/// The bytes of living tensors.
#[allow(dead_code, reason = "not by each test")]
pub fn live_bytes() -> usize {
    ALL.bytes.load(Relaxed)
}

/// How far the bytes of living tensors grow above what they are now.
#[allow(dead_code, reason = "not by each test")]
pub fn growth_bytes<R>(work: impl FnOnce() -> R) -> (usize, R) {
    ALL.growth(work)
}

/// As [`growth_bytes`], of the tensors that are made on this thread: of one rank.
#[allow(dead_code, reason = "not by each test")]
pub fn own_growth_bytes<R>(work: impl FnOnce() -> R) -> (usize, R) {
    OWN.with(Arc::clone).growth(work)
}

fn note(event: Event) {
    EVENTS.lock().unwrap().push(event);
}

/// A tensor that is counted. Views count as tensors of their own.
#[derive(Clone)]
pub struct Counted<T> {
    inner: T,
    bytes: Arc<Bytes>,
}

struct Bytes {
    bytes: usize,
    of_thread: Arc<Live>,
}

impl Bytes {
    fn of(bytes: usize) -> Arc<Self> {
        let of_thread = OWN.with(Arc::clone);
        ALL.add(bytes);
        of_thread.add(bytes);
        Arc::new(Self { bytes, of_thread })
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        ALL.remove(self.bytes);
        self.of_thread.remove(self.bytes);
    }
}

impl<T: TensorMetadata> Counted<T> {
    fn new(inner: T) -> Self {
        let bytes = Bytes::of(inner.shape().num_elements() * inner.dtype().size());
        Self { inner, bytes }
    }

    /// The operation that takes it is what holds it from now on.
    fn open(self) -> T {
        self.inner
    }
}

impl<T: fmt::Debug> fmt::Debug for Counted<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {} bytes", self.inner, self.bytes.bytes)
    }
}

impl<T: TensorMetadata> TensorMetadata for Counted<T> {
    burn_decorator::forward_metadata!(inner);
}

impl<B: Backend> BackendTypes for Probe<B> {
    burn_decorator::forward_types!(B, float tensor: Counted<B::FloatTensorPrimitive>);
}

impl<B: Backend> Backend for Probe<B> {
    burn_decorator::forward_device!(B);

    fn name(device: &Self::Device) -> String {
        format!("probe<{}>", B::name(device))
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }
}

/// Ready when it is polled for the second time.
async fn second_poll() {
    let mut asked = false;
    poll_fn(|context| match std::mem::replace(&mut asked, true) {
        true => Poll::Ready(()),
        false => {
            context.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await;
}

macro_rules! open {
    (FloatRef $x:ident) => {
        &$x.inner
    };
    ($kind:tt $x:ident) => {
        map_operand!($kind $x, Counted::open)
    };
}

macro_rules! method {
    (float_from_data($($arg:tt)*) -> $ret:tt) => {
        fn float_from_data(data: TensorData, device: &Device<Self>) -> FloatTensor<Self> {
            note(Event::Up(data.bytes.len()));
            UPLOADS.lock().unwrap().push(Upload {
                address: data.as_bytes().as_ptr() as usize,
                bytes: data.bytes.len(),
            });
            Counted::new(B::float_from_data(data, device))
        }
    };
    (float_into_data($($arg:tt)*) -> $ret:tt) => {
        async fn float_into_data(tensor: FloatTensor<Self>) -> Result<TensorData, ExecutionError> {
            second_poll().await;
            let data = B::float_into_data(tensor.inner).await?;
            note(Event::Down(data.bytes.len()));
            Ok(data)
        }
    };
    // The device holds what is read until it is there.
    (tr_execute($transaction:ident: $kind:tt) -> $ret:tt) => {
        fn tr_execute($transaction: kind_type!($kind)) -> kind_type!($ret) {
            let held: Vec<Arc<Bytes>> = $transaction.read_floats.iter().map(|read| read.bytes.clone()).collect();
            let read = B::tr_execute(open!($kind $transaction));
            async move {
                second_poll().await;
                let data = read.await?;
                drop(held);
                for read in &data.read_floats {
                    note(Event::Down(read.bytes.len()));
                }
                Ok(data)
            }
        }
    };
    (float_device($tensor:ident: FloatRef) -> $ret:tt) => {
        fn float_device(tensor: &FloatTensor<Self>) -> Device<Self> {
            B::float_device(&tensor.inner)
        }
    };
    ($op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            note(Event::Computed(stringify!($op)));
            map_result!($ret B::$op($(open!($kind $arg)),*), Counted::new)
        }
    };
}

macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for Probe<B> {
            $(method! { $op($($arg: $kind),*) -> $ret })*
        }
    };
}

burn_decorator::every_ops!(implement);
