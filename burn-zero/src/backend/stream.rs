//! Separate random numbers for each rank.
//!
//! A backend has one generator a process: ranks that are threads would draw from it in an order
//! that differs from run to run. So a rank with a seed seeds the generator before each draw, with a
//! number that depends on its seed, its rank and the number of its earlier draws, under a lock that
//! all draws on a `Sharded` backend take. A rank's numbers are then the same in every run, and the
//! same for threads and processes. Draws directly on the inner backend do not take the lock and can
//! interfere.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use burn_backend::Backend;
use burn_backend::tensor::Device;
use burn_decorator::split_mix::{mixed, output};
use parking_lot::Mutex;

use crate::reduce::GradientReducer;

thread_local! {
    static STREAM: RefCell<Option<Stream>> = const { RefCell::new(None) };
}

/// Held from the seeding of a draw to its end.
static DRAWING: Mutex<()> = Mutex::new(());

struct Stream {
    /// Weak, so that the stream ends with its training.
    training: Weak<GradientReducer>,
    rank: usize,
    seed: u64,
    drawn: u64,
}

/// Until the training ends, this thread draws the numbers of `rank` and `seed`.
pub(crate) fn begin(training: &Arc<GradientReducer>, rank: usize, seed: u64) {
    let stream = Stream {
        training: Arc::downgrade(training),
        rank,
        seed,
        drawn: 0,
    };
    STREAM.set(Some(stream));
}

/// Seeds the stream of this thread's rank, or the inner backend if there is none.
pub(super) fn seed<A: Backend>(device: &Device<A>, seed: u64) {
    let is_own = with_stream(|stream| {
        stream.seed = seed;
        stream.drawn = 0;
    });
    if is_own.is_none() {
        let _drawing = DRAWING.lock();
        A::seed(device, seed);
    }
}

/// Draws from the stream of this thread's rank, if it has one.
pub(super) fn draw<A: Backend, R>(device: &Device<A>, draw: impl FnOnce() -> R) -> R {
    let seed = with_stream(Stream::next);
    let _drawing = DRAWING.lock(); // other threads' draws must not come between
    if let Some(seed) = seed {
        A::seed(device, seed);
    }
    draw()
}

fn with_stream<R>(use_it: impl FnOnce(&mut Stream) -> R) -> Option<R> {
    STREAM.with_borrow_mut(|stream| {
        let stream = stream.as_mut()?;
        (stream.training.strong_count() > 0).then(|| use_it(stream))
    })
}

impl Stream {
    /// The seed of the next draw.
    fn next(&mut self) -> u64 {
        let of_rank = mixed(self.seed ^ mixed(self.rank as u64));
        let seed = output(of_rank, self.drawn);
        self.drawn += 1;
        seed
    }
}
