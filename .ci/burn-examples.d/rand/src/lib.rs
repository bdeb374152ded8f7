//! rand, whose generator of a thread is seeded: each run draws the same numbers.

use core::cell::RefCell;
use core::convert::Infallible;

use real::rngs::StdRng;
pub use real::*;

thread_local! {
    static GENERATOR: RefCell<StdRng> = RefCell::new(StdRng::seed_from_u64(42));
}

pub struct SeededRng;

pub fn rng() -> SeededRng {
    SeededRng
}

impl TryRng for SeededRng {
    type Error = Infallible;

    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        Ok(GENERATOR.with_borrow_mut(StdRng::next_u32))
    }

    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        Ok(GENERATOR.with_borrow_mut(StdRng::next_u64))
    }

    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
        GENERATOR.with_borrow_mut(|generator| generator.fill_bytes(bytes));
        Ok(())
    }
}
