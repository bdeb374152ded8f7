//! Laws about what is launched and read. In a process of their own: a live loss scaler is found by
//! f16 losses of other threads.

mod counts;
mod first_non_finite;
#[cfg(feature = "vulkan")]
mod fused;
mod reads;
