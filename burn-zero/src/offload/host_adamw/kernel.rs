//! The arithmetic, and how it is spread over threads and vectors.

use half::{bf16, f16, slice::HalfFloatSliceExt};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::{AdamWStep, DecayMode, Gradients, HostAdamWConfig, ParamsOut, simd::dispatch};

/// Elements a task: 1.8 MiB of traffic, enough to hide the cost of a task and few enough to balance the threads.
pub(super) const CHUNK: usize = 64 * 1024;

/// Elements converted at a time between low precision and f32. They stay in the first-level cache, so that a step is one
/// pass over memory whatever the dtypes are.
const BLOCK: usize = 1024;

/// The factors of one step, as PyTorch computes them: in f64, then rounded once.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    grad_scale: f32,
    /// 1 - beta_1
    blend_1: f32,
    beta_2: f32,
    /// 1 - beta_2
    blend_2: f32,
    /// 1 - learning rate * weight decay
    keep: f32,
    /// learning rate / (1 - beta_1^step)
    step_size: f32,
    /// 1 / sqrt(1 - beta_2^step)
    root_correction: f32,
    epsilon: f32,
    decay_mode: DecayMode,
}

impl Factors {
    /// Those of step number `step`, counted from 1.
    pub(super) fn new(config: &HostAdamWConfig, args: &AdamWStep, step: u64) -> Self {
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        Self {
            grad_scale: args.grad_scale,
            blend_1: (1.0 - config.beta_1) as f32,
            beta_2: config.beta_2 as f32,
            blend_2: (1.0 - config.beta_2) as f32,
            keep: (1.0 - args.learning_rate * args.weight_decay) as f32,
            step_size: (args.learning_rate / correction(config.beta_1)) as f32,
            root_correction: (1.0 / correction(config.beta_2).sqrt()) as f32,
            epsilon: config.epsilon as f32,
            decay_mode: config.decay_mode,
        }
    }

    /// One element: `torch.optim.AdamW` with decoupled decay, bias correction, and epsilon outside of the root.
    #[inline(always)]
    fn update<const CAUTIOUS: bool>(
        &self,
        gradient: f32,
        master: &mut f32,
        moment_1: &mut f32,
        moment_2: &mut f32,
    ) {
        let gradient = gradient * self.grad_scale;
        let first = *moment_1 + (gradient - *moment_1) * self.blend_1;
        let second = *moment_2 * self.beta_2 + gradient * gradient * self.blend_2;
        let against = CAUTIOUS && ((*master >= 0.0) != (first >= 0.0));
        let keep = if against { 1.0 } else { self.keep };
        let direction = first / (second.sqrt() * self.root_correction + self.epsilon);
        *master = *master * keep - direction * self.step_size;
        *moment_1 = first;
        *moment_2 = second;
    }
}

/// All that a range of elements needs. The slices are of one length.
pub(super) struct Elements<'a> {
    pub(super) gradients: Gradients<'a>,
    pub(super) master: &'a mut [f32],
    pub(super) moment_1: &'a mut [f32],
    pub(super) moment_2: &'a mut [f32],
    pub(super) out: Option<ParamsOut<'a>>,
}

impl<'a> Elements<'a> {
    fn split_at(self, at: usize) -> (Self, Self) {
        let (gradients, gradients_tail) = self.gradients.split_at(at);
        let (master, master_tail) = self.master.split_at_mut(at);
        let (moment_1, moment_1_tail) = self.moment_1.split_at_mut(at);
        let (moment_2, moment_2_tail) = self.moment_2.split_at_mut(at);
        let (out, out_tail) = self.out.map(|out| out.split_at(at)).unzip();
        let head = Self {
            gradients,
            master,
            moment_1,
            moment_2,
            out,
        };
        let tail = Self {
            gradients: gradients_tail,
            master: master_tail,
            moment_1: moment_1_tail,
            moment_2: moment_2_tail,
            out: out_tail,
        };
        (head, tail)
    }

    fn chunks(self) -> Vec<Self> {
        let mut chunks = Vec::with_capacity(self.master.len().div_ceil(CHUNK));
        let mut rest = self;
        while rest.master.len() > CHUNK {
            let (head, tail) = rest.split_at(CHUNK);
            chunks.push(head);
            rest = tail;
        }
        chunks.push(rest);
        chunks
    }
}

/// Updates all elements, on the current rayon pool. Each element's result depends on nothing but itself, so neither the
/// number of threads nor the instructions change a bit.
pub(super) fn update(arch: Arch, factors: Factors, elements: Elements<'_>) {
    let run = |elements| dispatch(arch, ChunkUpdate { factors, elements });
    if elements.master.len() <= CHUNK {
        return run(elements);
    }
    elements.chunks().into_par_iter().for_each(run);
}

/// One chunk. Everything below it is inlined, so that it is compiled for the chosen instructions.
struct ChunkUpdate<'a> {
    factors: Factors,
    elements: Elements<'a>,
}

impl WithSimd for ChunkUpdate<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        match self.factors.decay_mode {
            DecayMode::Decoupled => self.run::<false>(),
            DecayMode::Cautious => self.run::<true>(),
        }
    }
}

impl ChunkUpdate<'_> {
    #[inline(always)]
    fn run<const CAUTIOUS: bool>(self) {
        let Elements {
            gradients,
            master,
            moment_1,
            moment_2,
            mut out,
        } = self.elements;
        let mut widened = [0.0; BLOCK];
        let blocks = master
            .chunks_mut(BLOCK)
            .zip(moment_1.chunks_mut(BLOCK))
            .zip(moment_2.chunks_mut(BLOCK));
        for (index, ((master, moment_1), moment_2)) in blocks.enumerate() {
            let at = index * BLOCK;
            let range = at..at + master.len();
            let gradients = match gradients {
                Gradients::F32(slice) => &slice[range.clone()],
                Gradients::Bf16(slice) => widen_bf16(&slice[range.clone()], &mut widened),
                Gradients::F16(slice) => widen_f16(&slice[range.clone()], &mut widened),
            };
            update_block::<CAUTIOUS>(&self.factors, gradients, master, moment_1, moment_2);
            match &mut out {
                None => {}
                Some(ParamsOut::Bf16(slice)) => narrow_bf16(master, &mut slice[range]),
                Some(ParamsOut::F16(slice)) => slice[range].convert_from_f32_slice(master),
            }
        }
    }
}

#[inline(always)]
fn update_block<const CAUTIOUS: bool>(
    factors: &Factors,
    gradients: &[f32],
    master: &mut [f32],
    moment_1: &mut [f32],
    moment_2: &mut [f32],
) {
    let elements = gradients.iter().zip(master).zip(moment_1).zip(moment_2);
    for (((gradient, master), moment_1), moment_2) in elements {
        factors.update::<CAUTIOUS>(*gradient, master, moment_1, moment_2);
    }
}

#[inline(always)]
fn widen_bf16<'a>(slice: &[bf16], widened: &'a mut [f32; BLOCK]) -> &'a [f32] {
    let widened = &mut widened[..slice.len()];
    for (wide, low) in widened.iter_mut().zip(slice) {
        *wide = f32::from_bits(u32::from(low.to_bits()) << 16);
    }
    widened
}

#[inline(always)]
fn narrow_bf16(slice: &[f32], low: &mut [bf16]) {
    for (low, wide) in low.iter_mut().zip(slice) {
        *low = bf16::from_f32(*wide);
    }
}

/// With the conversion instructions where the processor has them: `half` looks at run time.
#[inline(always)]
fn widen_f16<'a>(slice: &[f16], widened: &'a mut [f32; BLOCK]) -> &'a [f32] {
    let widened = &mut widened[..slice.len()];
    slice.convert_to_f32_slice(widened);
    widened
}
