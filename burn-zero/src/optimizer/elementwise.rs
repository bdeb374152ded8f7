//! Whether an optimizer updates each element by itself, found by trying it.

use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::{Tensor, TensorData, backend::AutodiffBackend};

use super::shards::{Shards, piece_id};
use crate::ShardingError;
use crate::host::HostRead;

const WEIGHTS: [f32; 4] = [0.5, -1.5, 2.0, -0.25];
/// Far beyond any threshold of clipping, and of very different sizes.
const GRADIENTS: [[f32; 4]; 2] = [[3.0e4, -0.125, 6.0, 2.0e2], [-1.0e2, 8.0, 5.0e3, -0.5]];
/// Positions of the trial's pieces: no parameter's, of which the optimizer may have state.
const TRIAL: usize = 1 << 31;

/// Takes two steps with a trial tensor, whole and in pieces of one element. The optimizer itself is left as it is.
///
/// # Errors
///
/// [`ShardingError::NotElementwise`] if the two differ by more than rounding.
pub(super) fn check<B, O>(optimizer: &O, device: &B::Device) -> Result<(), ShardingError>
where
    B: AutodiffBackend,
    O: Optimizer<Shards<B>, B>,
{
    let name = core::any::type_name::<O>();
    // It would panic over a tensor of rank 1.
    let refuse = |whole, cut| ShardingError::NotElementwise {
        optimizer: name.to_owned(),
        whole,
        cut,
    };
    if name.contains("::Muon") {
        return Err(refuse(Vec::new(), Vec::new()));
    }
    let whole = trial::<B, O>(optimizer.clone(), 4, device);
    let cut = trial::<B, O>(optimizer.clone(), 1, device);
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * a.abs().max(1.0);
    if whole.iter().zip(&cut).all(close) {
        Ok(())
    } else {
        Err(refuse(whole, cut))
    }
}

/// The weights after two steps, cut in pieces of so many elements.
fn trial<B, O>(mut optimizer: O, elements: usize, device: &B::Device) -> Vec<f32>
where
    B: AutodiffBackend,
    O: Optimizer<Shards<B>, B>,
{
    let tensor =
        |values: &[f32]| Tensor::<B::InnerBackend, 1>::from_data(TensorData::from(values), device);
    let pieces = WEIGHTS
        .chunks(elements)
        .enumerate()
        .map(|(index, weights)| {
            let weights = Tensor::<B, 1>::from_inner(tensor(weights));
            (TRIAL + index, weights.into_primitive().tensor())
        });
    let mut shards = Shards::new(pieces.collect());
    for gradients in GRADIENTS {
        let mut params = GradientsParams::new();
        for (index, gradient) in gradients.chunks(elements).enumerate() {
            params.register(piece_id(TRIAL + index), tensor(gradient));
        }
        shards = optimizer.step(0.1, shards, params);
    }
    let pieces = shards.into_pieces();
    pieces
        .flat_map(|(_, piece)| HostRead::start::<B::InnerBackend>(B::inner(piece)).wait())
        .collect()
}
