//! Random numbers of a rank's own.
//!
//! A backend's generator is one for the process: ranks that are threads would draw from it in an order that differs from run to run.
//! So a rank that was given a seed seeds the generator before each draw, with a number that depends on its seed, its rank and
//! how often it has drawn; others that draw on a `Sharded` backend wait. What a rank draws is then the same in every run, and the
//! same for threads and processes. Only who draws on the inner backend meanwhile, past this one, could come between.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use burn_backend::Backend;
use burn_backend::tensor::Device;
use parking_lot::Mutex;

use crate::reduce::GradientReducer;

thread_local! {
    static STREAM: RefCell<Option<Stream>> = const { RefCell::new(None) };
}

/// Held from the seed of a draw to its end.
static DRAWING: Mutex<()> = Mutex::new(());

struct Stream {
    /// Weak: a training that is over is forgotten.
    training: Weak<GradientReducer>,
    rank: usize,
    seed: u64,
    drawn: u64,
}

/// From now on, and as long as the training lasts, this thread draws the numbers of `rank` and `seed`.
pub(crate) fn begin(training: &Arc<GradientReducer>, rank: usize, seed: u64) {
    let stream = Stream {
        training: Arc::downgrade(training),
        rank,
        seed,
        drawn: 0,
    };
    STREAM.set(Some(stream));
}

/// Seeds the stream of this thread's rank, or else the inner backend.
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

/// Draws, from this rank's numbers if it has its own.
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
        self.drawn += 1;
        mixed(of_rank.wrapping_add(self.drawn.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
    }
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood 2014).
fn mixed(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
