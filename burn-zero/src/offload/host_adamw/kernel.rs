//! The arithmetic, and how it is spread over threads and vectors.

use core::ops::Range;

use half::{bf16, f16, slice::HalfFloatSliceExt};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::offload::HostAdamWConfig;

/// Elements a task: 1.8 MiB of traffic, enough to hide the cost of a task and few enough to balance
/// the threads.
pub(super) const CHUNK: usize = 64 * 1024;

/// Elements in a block: the unit of conversions, and the prefetch distance. Two blocks of 16 bytes
/// an element stay in a first-level cache of 48 KiB, so that a step is one pass over memory; 512 to
/// 768 was fastest.
const BLOCK: usize = 768;

/// Elements whose f32 fill a cache line.
const LINE: usize = 16;

/// Gradients that a step reads.
#[derive(Clone, Copy, Debug)]
pub enum Gradients<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Brain floating point, widened exactly.
    Bf16(&'a [bf16]),
    /// Half precision, widened exactly.
    F16(&'a [f16]),
}

/// The buffer for a low-precision copy of the updated parameters: half the bytes of the f32 master
/// to upload.
///
/// Rounded to nearest, ties to even. f16 overflows to infinity from 65520 on.
#[derive(Debug)]
pub enum ParamsOut<'a> {
    /// Brain floating point.
    Bf16(&'a mut [bf16]),
    /// Half precision.
    F16(&'a mut [f16]),
}

impl<'a> Gradients<'a> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::F32(all) => all.len(),
            Self::Bf16(all) => all.len(),
            Self::F16(all) => all.len(),
        }
    }

    #[inline(always)]
    fn part(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(all) => Self::F32(&all[range]),
            Self::Bf16(all) => Self::Bf16(&all[range]),
            Self::F16(all) => Self::F16(&all[range]),
        }
    }

    #[inline(always)]
    fn prefetch(&self, index: usize) {
        match self {
            Self::F32(all) => prefetch(all, index),
            Self::Bf16(all) => prefetch(all, index),
            Self::F16(all) => prefetch(all, index),
        }
    }
}

impl<'a> ParamsOut<'a> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Bf16(all) => all.len(),
            Self::F16(all) => all.len(),
        }
    }

    fn chunks(self) -> Vec<Self> {
        match self {
            Self::Bf16(all) => all.chunks_mut(CHUNK).map(Self::Bf16).collect(),
            Self::F16(all) => all.chunks_mut(CHUNK).map(Self::F16).collect(),
        }
    }
}

/// A gradient as it is given.
trait Widen: Copy {
    fn widen(self) -> f32;
}

impl Widen for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Widen for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

/// An element of the low-precision copy; `()` where there is none.
trait Narrow: Copy {
    fn narrow(value: f32) -> Self;
}

impl Narrow for () {
    #[inline(always)]
    fn narrow(_: f32) {}
}

impl Narrow for bf16 {
    /// The bits of `bf16::from_f32` without its branches, which would prevent vectorization.
    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet_nan = (bits >> 16) | 0x40;
        bf16::from_bits(if value.is_nan() { quiet_nan } else { rounded } as u16)
    }
}

/// The factors of one step, as PyTorch computes them: in f64, then rounded once.
#[derive(Clone, Copy)]
pub(super) struct Factors {
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
}

impl Factors {
    /// The factors of step number `step`, counted from 1.
    pub(super) fn new(config: &HostAdamWConfig, learning_rate: f64, step: u64) -> Self {
        let correction = |beta: f64| 1.0 - beta.powf(step as f64);
        Self {
            blend_1: (1.0 - config.beta_1) as f32,
            beta_2: config.beta_2 as f32,
            blend_2: (1.0 - config.beta_2) as f32,
            keep: (1.0 - learning_rate * config.weight_decay) as f32,
            step_size: (learning_rate / correction(config.beta_1)) as f32,
            root_correction: (1.0 / correction(config.beta_2).sqrt()) as f32,
            epsilon: config.epsilon as f32,
        }
    }

    /// One element: `torch.optim.AdamW` with decoupled decay, bias correction, and epsilon outside
    /// of the root.
    #[inline(always)]
    fn update(&self, gradient: f32, master: &mut f32, moment_1: &mut f32, moment_2: &mut f32) {
        let first = *moment_1 + (gradient - *moment_1) * self.blend_1;
        let second = *moment_2 * self.beta_2 + gradient * gradient * self.blend_2;
        let direction = first / (second.sqrt() * self.root_correction + self.epsilon);
        *master = *master * self.keep - direction * self.step_size;
        *moment_1 = first;
        *moment_2 = second;
    }
}

/// Updates all elements, on the current rayon pool: gradients, the state (master parameters, first
/// and second moments) and the low-precision copy, in slices of one length. Each element's result
/// depends on that element alone, so neither the number of threads nor the instructions change a
/// bit.
pub(super) fn update(
    arch: Arch,
    factors: Factors,
    gradients: Gradients<'_>,
    state: [&mut [f32]; 3],
    out: Option<ParamsOut<'_>>,
) {
    let chunks = gradients.len().div_ceil(CHUNK);
    let out: Vec<_> = match out {
        None => (0..chunks).map(|_| None).collect(),
        Some(out) => out.chunks().into_iter().map(Some).collect(),
    };
    let [master, moment_1, moment_2] = state.map(|all| all.par_chunks_mut(CHUNK));
    let all = master.zip(moment_1).zip(moment_2).zip(out).enumerate();
    all.for_each(|(number, (((master, moment_1), moment_2), out))| {
        let start = number * CHUNK;
        arch.dispatch(Chunk {
            factors,
            gradients: gradients.part(start..start + master.len()),
            state: [master, moment_1, moment_2],
            out,
        });
    });
}

/// One chunk. Everything below it is inlined, so that it is compiled for the chosen instructions.
struct Chunk<'a> {
    factors: Factors,
    gradients: Gradients<'a>,
    state: [&'a mut [f32]; 3],
    out: Option<ParamsOut<'a>>,
}

impl WithSimd for Chunk<'_> {
    type Output = ();

    /// Block by block. bf16 is converted in registers, f16 in the first-level cache, before and
    /// after the update of a block.
    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        let mut widened = [0.0; BLOCK];
        let all = self.gradients.len();
        for start in (0..all).step_by(BLOCK) {
            let end = all.min(start + BLOCK);
            match self.gradients.part(start..end) {
                Gradients::F32(gradients) => self.block(start, gradients),
                Gradients::Bf16(gradients) => self.block(start, gradients),
                Gradients::F16(gradients) => {
                    let widened = &mut widened[..end - start];
                    gradients.convert_to_f32_slice(widened);
                    self.block(start, widened);
                }
            }
        }
    }
}

impl Chunk<'_> {
    #[inline(always)]
    fn block<G: Widen>(&mut self, start: usize, gradients: &[G]) {
        let (factors, length) = (&self.factors, gradients.len());
        let state = self.state.each_mut();
        let state = state.map(|all| all[start..].split_at_mut(length));
        let [(master, next), (moment_1, next_1), (moment_2, next_2)] = state;
        let state = [&mut *master, moment_1, moment_2];
        let all_gradients = self.gradients;
        let prefetch_next = |index: usize| {
            all_gradients.prefetch(start + length + index);
            for slice in [&*next, &*next_1, &*next_2] {
                prefetch(slice, index);
            }
        };
        let none = &mut [(); BLOCK][..length];
        match &mut self.out {
            None => sweep(factors, gradients, state, none, prefetch_next),
            Some(ParamsOut::Bf16(out)) => {
                let (out, next) = out[start..].split_at_mut(length);
                sweep(factors, gradients, state, out, |index| {
                    prefetch_next(index);
                    prefetch(next, index);
                });
            }
            Some(ParamsOut::F16(out)) => {
                let (out, next) = out[start..].split_at_mut(length);
                sweep(factors, gradients, state, none, |index| {
                    prefetch_next(index);
                    prefetch(next, index);
                });
                out.convert_from_f32_slice(master);
            }
        }
    }
}

/// Prefetches the cache line of the element at `index`, if it exists. Does not block.
///
/// Only on x86-64, where safe code can do it; elsewhere the processor's own prefetcher is used.
#[inline(always)]
fn prefetch<T>(slice: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(element) = slice.get(index) {
        safe_arch::prefetch_t0(element);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, index);
}

/// Updates a block line by line, and prefetches the same line of the next block meanwhile.
#[inline(always)]
fn sweep<G: Widen, O: Narrow>(
    factors: &Factors,
    gradients: &[G],
    [master, moment_1, moment_2]: [&mut [f32]; 3],
    out: &mut [O],
    prefetch: impl Fn(usize),
) {
    let (gradients, gradients_rest) = gradients.as_chunks::<LINE>();
    let (master, master_rest) = master.as_chunks_mut::<LINE>();
    let (moment_1, moment_1_rest) = moment_1.as_chunks_mut::<LINE>();
    let (moment_2, moment_2_rest) = moment_2.as_chunks_mut::<LINE>();
    let (out, out_rest) = out.as_chunks_mut::<LINE>();
    let lines = gradients.iter().zip(master).zip(moment_1).zip(moment_2);
    for (line, ((((gradient, master), moment_1), moment_2), out)) in lines.zip(out).enumerate() {
        prefetch(line * LINE);
        // Copies do not overlap: the compiler need not check it at every line.
        let (mut param, mut first, mut second) = (*master, *moment_1, *moment_2);
        let mut low = *out;
        for lane in 0..LINE {
            let state = (&mut param[lane], &mut first[lane], &mut second[lane]);
            factors.update(gradient[lane].widen(), state.0, state.1, state.2);
            low[lane] = O::narrow(param[lane]);
        }
        (*master, *moment_1, *moment_2, *out) = (param, first, second, low);
    }
    let rest = gradients_rest.iter().zip(master_rest);
    let rest = rest.zip(moment_1_rest).zip(moment_2_rest).zip(out_rest);
    for ((((gradient, master), moment_1), moment_2), out) in rest {
        factors.update(gradient.widen(), master, moment_1, moment_2);
        *out = O::narrow(*master);
    }
}
