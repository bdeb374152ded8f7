//! Whether an optimizer can be sharded exactly, found by trying it the way real ranks run it.

use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::{Tensor, TensorData, TensorPrimitive, backend::AutodiffBackend};
use burn_backend::ops::FloatTensorOps;
use burn_decorator::ranks::SharedFn;

use super::parameter_shards::{ParameterShards, shard_id};
use crate::group::ProcessGroup;
use crate::host::HostRead;
use crate::shard::Partition;
use crate::{ZeroError, ZeroOptimizerError, ZeroSettings};

/// Two tensors of four elements.
const WEIGHTS: [f32; 8] = [0.5, -1.5, 2.0, -0.25, 1.25, -0.75, 0.125, 3.0];
const TENSOR: usize = 4;
/// Far beyond any threshold of clipping, of very different sizes, and one element next to an epsilon.
const GRADIENTS: [[f32; 8]; 3] = [
    [3.0e4, -0.125, 6.0, 2.0e2, -1.0, 2.0e-7, 40.0, -7.0e2],
    [-1.0e2, 8.0, 5.0e3, -0.5, 0.25, -3.0e-7, 0.5, 90.0],
    [7.0, 0.5, -2.0e3, 1.0e3, -3.0, 1.0e-7, -2.0e4, 0.0625],
];
const LR: f64 = 0.1;
/// Positions of the trial's pieces: no parameter's, of which the optimizer may have state.
const TRIAL: usize = 1 << 31;

/// Who is handed the norm over all ranks: [`with_norm`](crate::ZeroOptimizer::with_norm).
pub(super) type NormReceiver = SharedFn<f32, ()>;

/// What the optimizer makes of tensors that all ranks know: its settings, as far as they matter.
///
/// Takes some steps with clones, which meet tensors cut as finely as any number of ranks can cut them: one element, or with
/// [`Partition::Whole`] one matrix. First one clone meets all pieces, then, if there are other ranks, each piece has its own
/// clone, as each rank has its own optimizer. The optimizer itself is left as it is.
///
/// # Errors
///
/// [`ZeroOptimizerError::NotElementwise`], [`ZeroOptimizerError::Coupled`] if the results differ by more than rounding;
/// [`ZeroOptimizerError::SharedState`] if the trial cannot tell, because clones share what their updates depend on.
pub(super) fn run<B, O>(
    optimizer: &O,
    settings: &ZeroSettings,
    ranks: usize,
    norm: Option<&NormReceiver>,
    device: &B::Device,
) -> Result<Vec<f32>, ZeroOptimizerError>
where
    B: AutodiffBackend,
    O: Optimizer<ParameterShards<B>, B>,
{
    let optimizer_name = || core::any::type_name::<O>().to_owned();
    let together = |cuts: &[Cut]| take_steps::<B, O>(optimizer.clone(), cuts, norm, device);
    let whole = match settings.partition {
        // Many optimizers for matrices refuse other tensors by a panic, which ends an MPI job: only matrices are tried.
        Partition::Whole => cuts(TENSOR, Some([2, 2])),
        Partition::Flat => cuts(TENSOR, None),
    };
    if settings.partition == Partition::Flat && optimizer_name().contains("::Muon") {
        // It panics over a tensor of rank 1, so that it cannot be tried.
        return Err(ZeroOptimizerError::NotElementwise {
            optimizer: optimizer_name(),
            whole: Vec::new(),
            cut: Vec::new(),
        });
    }
    let found = together(&whole);
    if !same(&found, &together(&whole)) {
        let optimizer = optimizer_name();
        return Err(ZeroOptimizerError::SharedState { optimizer });
    }
    let pieces = match settings.partition {
        Partition::Whole => whole,
        Partition::Flat => {
            let pieces = cuts(1, None);
            let cut = together(&pieces);
            if !close(&found, &cut, EXACT) {
                return Err(ZeroOptimizerError::NotElementwise {
                    optimizer: optimizer_name(),
                    whole: found,
                    cut,
                });
            }
            pieces
        }
    };
    if ranks > 1 {
        let alone: Vec<f32> = pieces.chunks(1).flat_map(together).collect();
        if !close(&found, &alone, EXACT) {
            return Err(ZeroOptimizerError::Coupled {
                optimizer: optimizer_name(),
                together: found,
                alone,
            });
        }
    }
    Ok(found)
}

/// Compares what the optimizers of all ranks made of the trial. All ranks come here, also those whose optimizer was refused.
///
/// # Errors
///
/// Why this rank's optimizer was refused; [`ZeroError::Disagreement`]; those of the group.
pub(super) fn agree(
    group: &dyn ProcessGroup,
    own: Result<Vec<f32>, ZeroOptimizerError>,
) -> Result<(), ZeroError> {
    let label = "settings of the optimizer, seen in what it makes of a trial";
    // One that is refused has made nothing.
    let bytes = own.as_deref().map_or(&[][..], bytemuck::cast_slice);
    let all = group.gather_bytes(label, bytes.to_vec())?;
    let own = own?;
    let all = all.iter().map(|bytes| {
        let floats = bytes.as_chunks().0.iter();
        floats.map(|&bytes| f32::from_ne_bytes(bytes)).collect()
    });
    let all: Vec<Vec<f32>> = all.collect();
    match all.iter().position(|other| !close(&own, other, ROUNDING)) {
        None => Ok(()),
        Some(peer) => Err(ZeroError::Disagreement {
            label: label.to_owned(),
            rank: group.rank(),
            value: format!("{own:?}"),
            peer,
            peer_value: match &all[peer][..] {
                [] => "an optimizer that cannot be sharded".to_owned(),
                made => format!("{made:?}"),
            },
        }),
    }
}

/// Some elements of the trial's tensors, and the shape in which the optimizer meets them.
struct Cut {
    first: usize,
    shape: Vec<usize>,
}

impl Cut {
    fn of<'a>(&self, elements: &'a [f32]) -> &'a [f32] {
        let length: usize = self.shape.iter().product();
        &elements[self.first..self.first + length]
    }
}

fn cuts(elements: usize, shape: Option<[usize; 2]>) -> Vec<Cut> {
    let shape = shape.map_or(vec![elements], Vec::from);
    let firsts = (0..WEIGHTS.len()).step_by(elements);
    let cuts = firsts.map(|first| Cut {
        first,
        shape: shape.clone(),
    });
    cuts.collect()
}

/// The weights of these pieces after the trial's steps.
fn take_steps<B, O>(
    mut optimizer: O,
    cuts: &[Cut],
    norm: Option<&NormReceiver>,
    device: &B::Device,
) -> Vec<f32>
where
    B: AutodiffBackend,
    O: Optimizer<ParameterShards<B>, B>,
{
    let tensor = |cut: &Cut, elements: &[f32]| {
        let data = TensorData::new(cut.of(elements).to_vec(), cut.shape.clone());
        B::InnerBackend::float_from_data(data, device)
    };
    let pieces = cuts.iter().map(|cut| {
        let weights = B::from_inner(tensor(cut, &WEIGHTS));
        (TRIAL + cut.first, weights)
    });
    let mut shards = ParameterShards::new(pieces.collect());
    for gradients in GRADIENTS {
        if let Some(receive) = norm {
            let squares = gradients.map(|gradient| f64::from(gradient).powi(2));
            receive.call(squares.iter().sum::<f64>().sqrt() as f32);
        }
        let mut params = GradientsParams::new();
        for cut in cuts {
            let gradient = TensorPrimitive::Float(tensor(cut, &gradients));
            // The container does not know the number of dimensions.
            let gradient = Tensor::<B::InnerBackend, 1>::from_primitive(gradient);
            params.register(shard_id(TRIAL + cut.first), gradient);
        }
        shards = optimizer.step(LR, shards, params);
    }
    let pieces = shards.into_pieces();
    pieces
        .flat_map(|(_, piece)| HostRead::start::<B::InnerBackend>(B::inner(piece)).wait())
        .collect()
}

/// Of results that are computed alike but for the order of sums: relative to an element, or to 1.
const EXACT: f32 = 1e-5;
/// Of results that are computed alike on machines whose kernels round otherwise.
const ROUNDING: f32 = 1e-6;

fn close(a: &[f32], b: &[f32], tolerance: f32) -> bool {
    let close = |(a, b): (&f32, &f32)| {
        (a - b).abs() <= tolerance * a.abs().max(1.0) || a.to_bits() == b.to_bits()
    };
    a.len() == b.len() && a.iter().zip(b).all(close)
}

fn same(a: &[f32], b: &[f32]) -> bool {
    close(a, b, 0.0)
}
