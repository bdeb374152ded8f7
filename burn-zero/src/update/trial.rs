//! Trial steps on fixed tensors: checks that an optimizer can be sharded as asked and has the same
//! settings on all ranks, because training would otherwise be wrong without any error.

use burn::optim::GradientsParams;
use burn::tensor::{Shape, Tensor, TensorData, TensorPrimitive, backend::AutodiffBackend};
use burn_backend::ops::FloatTensorOps;
use burn_decorator::ranks::copy_for_rank;
use burn_ranks::{Partition, ProcessGroup, RanksError};
use burn_update::{LastParts, UpdateError};
use bytemuck::{cast_slice, pod_collect_to_vec};

use super::parameter_shards::{ParameterShards, shard_id};
use super::shard_update::ShardUpdate;
use crate::error::{ShardingFault, ZeroError};
use crate::host::read_floats;
use crate::settings::ZeroSettings;

/// Two matrices of four elements: optimizers for matrices panic on other tensors.
const WEIGHTS: [f32; 8] = [0.5, -1.5, 2.0, -0.25, 1.25, -0.75, 0.125, 3.0];
/// Above any clipping threshold, of very different magnitudes, and one element near an epsilon.
const GRADIENTS: [[f32; 8]; 3] = [
    [3.0e4, -0.125, 6.0, 2.0e2, -1.0, 2.0e-7, 40.0, -7.0e2],
    [-1.0e2, 8.0, 5.0e3, -0.5, 0.25, -3.0e-7, 0.5, 90.0],
    [7.0, 0.5, -2.0e3, 1.0e3, -3.0, 1.0e-7, -2.0e4, 0.0625],
];
const LR: f64 = 0.1;
/// Positions of the trial's tensors, above those of parameters, for which the optimizer may have
/// state.
const TRIAL: usize = 1 << 31;
/// Tolerance for results that differ in the order of sums only: relative to an element, or to 1.
const EXACT: f32 = 1e-5;
/// Tolerance for the same computation on machines whose kernels round differently.
const ROUNDING: f32 = 1e-6;

/// The trial's tensors, updated by clones of the optimizer, which itself does not change.
///
/// One clone updates the two matrices. Then they are updated in the finest sharding: cut into
/// single elements, or whole with [`Partition::Whole`], each by a clone of its own if there are
/// other ranks. Both results must agree.
///
/// # Errors
///
/// [`ShardingFault::NotShardable`] if the results differ by more than rounding.
pub(super) fn run<B: AutodiffBackend>(
    inner: &ShardUpdate<B>,
    settings: &ZeroSettings,
    ranks: usize,
    device: &B::Device,
) -> Result<Vec<f32>, UpdateError> {
    let mut found = Vec::new();
    for (name, alone) in inner.alone() {
        found.extend(run_one::<B>(name, &alone, settings, ranks, device)?);
    }
    Ok(found)
}

/// [`run`] for one optimizer.
fn run_one<B: AutodiffBackend>(
    optimizer: String,
    inner: &ShardUpdate<B>,
    settings: &ZeroSettings,
    ranks: usize,
    device: &B::Device,
) -> Result<Vec<f32>, UpdateError> {
    // Handles of the optimizer, such as the norm's, are the copy's own.
    let copy = || copy_for_rank(|| inner.clone());
    let together =
        |shape: [usize; 2], firsts: &[usize]| take_steps::<B>(copy(), ranks, shape, firsts, device);
    let shape = match settings.partition {
        Partition::Flat => [1, 1],
        Partition::Whole => [2, 2],
    };
    let firsts: Vec<_> = (0..WEIGHTS.len()).step_by(shape[0] * shape[1]).collect();
    let found = together([2, 2], &[0, 4])?;
    let cut = if ranks == 1 {
        together(shape, &firsts)?
    } else {
        let mut cut = Vec::new();
        for &first in &firsts {
            cut.extend(together(shape, &[first])?);
        }
        cut
    };
    if close(&found, &cut, EXACT) {
        return Ok(found);
    }
    let is_coupled = close(&found, &together(shape, &firsts)?, EXACT);
    let refused = ShardingFault::NotShardable {
        optimizer,
        whole: found,
        cut,
        instead: if is_coupled { COUPLED } else { WHOLE },
    };
    Err(refused.into())
}

const WHOLE: &str = "it does not update each element by itself: set `partition: Partition::Whole`, and clip by the global norm instead \
                     of tensor by tensor";
const COUPLED: &str = "it updates a tensor in a way that depends on all it meets, which is one rank's shard: if it clips by the global \
                       norm, clip in the update, `Update::new(adamw).clip_norm(1.0)?.reduce(..)?`; otherwise it trains without ranks only";

/// Compares the trial's results of all ranks with rank 0's. Ranks whose optimizer was refused call
/// it too.
///
/// # Errors
///
/// Why this rank's optimizer was refused; [`RanksError::Disagreement`] on all ranks if any differs;
/// those of the group.
pub(super) fn agree(
    group: &dyn ProcessGroup,
    own: Result<Vec<f32>, UpdateError>,
) -> Result<(), UpdateError> {
    let label = "settings of the optimizer, seen in what it makes of a trial";
    // A refused optimizer has no result.
    let bytes = own.as_ref().map_or(&[][..], |made| cast_slice(made));
    let all = group.gather_bytes(label, bytes.to_vec());
    let all = all.map_err(ZeroError::from)?;
    own?;
    let all: Vec<Vec<f32>> = all.iter().map(|it| pod_collect_to_vec(it)).collect();
    let differs = |rank: &usize| !close(&all[0], &all[*rank], ROUNDING);
    let Some(odd) = (0..all.len()).find(differs) else {
        return Ok(());
    };
    let rank = group.rank();
    let peer = if differs(&rank) { 0 } else { odd };
    let made = |rank: usize| match &all[rank][..] {
        [] => "an optimizer that cannot be sharded".to_owned(),
        made => format!("{made:?}"),
    };
    let differ = RanksError::Disagreement {
        label: label.to_owned(),
        rank,
        value: made(rank),
        peer,
        peer_value: made(peer),
    };
    Err(ZeroError::from(differ).into())
}

/// The weights of the tensors of this shape that begin at these elements, after the trial's steps.
fn take_steps<B: AutodiffBackend>(
    mut inner: ShardUpdate<B>,
    ranks: usize,
    shape: [usize; 2],
    firsts: &[usize],
    device: &B::Device,
) -> Result<Vec<f32>, UpdateError> {
    let mut step = LastParts::<ParameterShards<B>, B>::trial_step(LR);
    let tensor = |elements: &[f32; 8], first: usize| {
        let elements = elements[first..first + Shape::from(shape).num_elements()].to_vec();
        B::InnerBackend::float_from_data(TensorData::new(elements, shape), device)
    };
    let weights = firsts.iter().map(|&first| {
        let weights = B::from_inner(tensor(&WEIGHTS, first));
        (shard_id(TRIAL + first), weights)
    });
    let mut shards = ParameterShards::with_ids(weights);
    for gradients in GRADIENTS {
        let norm = inner.wants_norm(ranks).then(|| {
            let squares = gradients.map(|gradient| f64::from(gradient).powi(2));
            squares.iter().sum::<f64>().sqrt() as f32
        });
        let mut params = GradientsParams::new();
        for &first in firsts {
            let gradient = burn_decorator::gradient::load(|| tensor(&gradients, first));
            let gradient = TensorPrimitive::Float(gradient);
            let gradient = Tensor::<B::InnerBackend, 2>::from_primitive(gradient);
            params.register(shard_id(TRIAL + first), gradient);
        }
        shards = inner.step(&mut step, norm, shards, params)?;
    }
    let shards = shards.into_ids();
    let updated = shards.flat_map(|(_, shard)| read_floats::<B::InnerBackend>(B::inner(shard)));
    Ok(updated.collect())
}

fn close(a: &[f32], b: &[f32], tolerance: f32) -> bool {
    let close = |(a, b): (&f32, &f32)| {
        (a - b).abs() <= tolerance * a.abs().max(1.0) || a.to_bits() == b.to_bits()
    };
    a.len() == b.len() && a.iter().zip(b).all(close)
}
