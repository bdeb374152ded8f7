//! stub
use burn::tensor::{Tensor, backend::Backend};
pub(crate) enum ActiveScale<I: Backend> {
    None,
    #[allow(dead_code)]
    Host {
        scale: f32,
        inv: f32,
    },
    #[allow(dead_code)]
    Device {
        scale: Tensor<I, 1>,
        inv: Tensor<I, 1>,
    },
}
pub(crate) fn active_scale<I: Backend>(_device: &I::Device) -> ActiveScale<I> {
    ActiveScale::None
}
pub(crate) fn observe_loss<I: Backend>(_device: &I::Device, _loss: Tensor<I, 1>) {}
/// stub
pub struct GradScaler;
