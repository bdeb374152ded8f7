//! The backend decorator.

mod backend;
#[path = "../../../../burn-checkpoint/src/decorator/bits.rs"]
mod bits;
#[path = "../../../../burn-checkpoint/src/decorator/operands.rs"]
mod operands;
#[path = "../../../../burn-checkpoint/src/decorator/ops.rs"]
mod ops;
#[path = "../../../../burn-checkpoint/src/decorator/results.rs"]
mod results;

pub use backend::Remat;
