//! Transfers that take their time, fail, or change what they carry.

use std::cell::Cell;
use std::task::Poll;
use std::time::Duration;

use burn_backend::{ExecutionError, TensorData};

/// How a read to the host goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(dead_code, reason = "not by each test")]
pub enum Reads {
    #[default]
    AtOnce,
    /// Only when asked for the hundredth time: a few looks do not get it, waiting does.
    Later,
    /// As `Later`, and then it fails.
    LaterNever,
    /// As `Later`, and then the backend panics.
    LaterPanic,
    /// The first look waits for 20 ms, as in cubecl-cuda and cubecl-hip.
    Blocks,
}

/// How an upload goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(dead_code, reason = "not by each test")]
pub enum Writes {
    #[default]
    Right,
    /// One bit differs.
    Wrong,
}

thread_local! {
    static LOOKS: Cell<usize> = const { Cell::new(0) };
    static READS: Cell<Reads> = const { Cell::new(Reads::AtOnce) };
    static WRITES: Cell<Writes> = const { Cell::new(Writes::Right) };
}

/// Runs a function while transfers that begin on this thread go like this.
#[allow(dead_code, reason = "not by each test")]
pub fn with_transfers<R>(reads: Reads, writes: Writes, run: impl FnOnce() -> R) -> R {
    struct Done;
    impl Drop for Done {
        fn drop(&mut self) {
            READS.set(Reads::AtOnce);
            WRITES.set(Writes::Right);
        }
    }
    let _done = Done;
    READS.set(reads);
    WRITES.set(writes);
    run()
}

/// How often this thread looked for the data of a read.
#[allow(dead_code, reason = "not by each test")]
pub fn looks() -> usize {
    LOOKS.get()
}

pub fn read<T: Send>(
    read: impl Future<Output = Result<T, ExecutionError>> + Send,
) -> impl Future<Output = Result<T, ExecutionError>> + Send {
    let reads = READS.get();
    let mut looks = match reads {
        Reads::AtOnce | Reads::Blocks => 0,
        Reads::Later | Reads::LaterNever | Reads::LaterPanic => 99,
    };
    async move {
        if reads == Reads::Blocks {
            std::thread::sleep(Duration::from_millis(20));
        }
        std::future::poll_fn(|context| {
            LOOKS.set(LOOKS.get() + 1);
            if looks == 0 {
                return Poll::Ready(());
            }
            looks -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        match reads {
            Reads::AtOnce | Reads::Blocks | Reads::Later => read.await,
            Reads::LaterNever => Err(ExecutionError::WithContext {
                reason: "the device is gone".to_owned(),
            }),
            Reads::LaterPanic => panic!("the driver panicked"),
        }
    }
}

pub fn write(mut data: TensorData) -> TensorData {
    if WRITES.get() == Writes::Wrong
        && let Some(byte) = data.bytes.first_mut()
    {
        *byte ^= 1;
    }
    data
}
