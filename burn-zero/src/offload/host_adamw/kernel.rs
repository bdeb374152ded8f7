//! The arithmetic, and how it is spread over threads and vectors.

use half::{bf16, f16, slice::HalfFloatSliceExt};
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use crate::offload::HostAdamWConfig;

/// Elements a task: 1.8 MiB of traffic, enough to hide the cost of a task and few enough to balance the threads.
pub(super) const CHUNK: usize = 64 * 1024;

/// Elements in a block: the unit of f16 conversion, and the prefetch distance. Two blocks of 16
/// bytes an element stay in a first-level cache of 48 KiB, so that a step is one pass over memory; 512 to 768 was fastest.
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

/// Where a low-precision copy of the updated parameters goes: for the upload, half the bytes of the f32 master.
///
/// Rounded to nearest, ties to even. f16 overflows to infinity from 65520 on.
#[derive(Debug)]
pub enum ParamsOut<'a> {
    /// Brain floating point.
    Bf16(&'a mut [bf16]),
    /// Half precision.
    F16(&'a mut [f16]),
}

/// `$body` with `$slice` bound to the slice of any of the types.
macro_rules! with_slice {
    ($of:expr, $enum:ident $($dtype:ident)*, $slice:ident => $body:expr) => {
        match $of {
            $($enum::$dtype($slice) => $body,)*
        }
    };
}

/// Cuts the slice of any of the types in two.
macro_rules! split {
    ($of:expr, $at:expr, $split:ident, $enum:ident $($dtype:ident)*) => {
        match $of {
            $($enum::$dtype(slice) => {
                let (head, tail) = slice.$split($at);
                ($enum::$dtype(head), $enum::$dtype(tail))
            })*
        }
    };
}

impl Gradients<'_> {
    pub(super) fn len(&self) -> usize {
        with_slice!(self, Self F32 Bf16 F16, slice => slice.len())
    }
}

impl ParamsOut<'_> {
    pub(super) fn len(&self) -> usize {
        with_slice!(self, Self Bf16 F16, slice => slice.len())
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
    /// Those of step number `step`, counted from 1.
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

    /// One element: `torch.optim.AdamW` with decoupled decay, bias correction, and epsilon outside of the root.
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

/// The state and gradients of a range of elements, in slices of one length.
pub(super) struct Elements<'a> {
    pub(super) gradients: Gradients<'a>,
    /// Master parameters, first and second moments.
    pub(super) state: [&'a mut [f32]; 3],
    pub(super) out: Option<ParamsOut<'a>>,
}

impl<'a> Elements<'a> {
    fn split_at(self, at: usize) -> (Self, Self) {
        let (gradients, gradients_tail) =
            split!(self.gradients, at, split_at, Gradients F32 Bf16 F16);
        let [master, first, second] = self.state.map(|slice| slice.split_at_mut(at));
        let halve = |out| split!(out, at, split_at_mut, ParamsOut Bf16 F16);
        let (out, out_tail) = self.out.map(halve).unzip();
        let head = Self {
            gradients,
            state: [master.0, first.0, second.0],
            out,
        };
        let tail = Self {
            gradients: gradients_tail,
            state: [master.1, first.1, second.1],
            out: out_tail,
        };
        (head, tail)
    }

    fn len(&self) -> usize {
        self.state[0].len()
    }

    fn chunks(self) -> Vec<Self> {
        let mut chunks = Vec::with_capacity(self.len().div_ceil(CHUNK));
        let mut rest = self;
        while rest.len() > CHUNK {
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
    let run = |elements| arch.dispatch(ChunkUpdate { factors, elements });
    if elements.len() <= CHUNK {
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
        let mut rest = self.elements;
        while rest.len() > 0 {
            let at = BLOCK.min(rest.len());
            let (block, tail) = rest.split_at(at);
            update_block(&self.factors, block, &tail);
            rest = tail;
        }
    }
}

/// bf16 is converted in registers; f16 in the first-level cache by `half`, which takes the conversion instructions where it
/// finds them at run time.
#[inline(always)]
fn update_block(factors: &Factors, block: Elements<'_>, next: &Elements<'_>) {
    let mut widened = [0.0; BLOCK];
    match block.gradients {
        Gradients::F32(slice) => block.narrow(factors, slice, next),
        Gradients::Bf16(slice) => block.narrow(factors, slice, next),
        Gradients::F16(slice) => {
            let widened = &mut widened[..slice.len()];
            slice.convert_to_f32_slice(widened);
            block.narrow(factors, widened, next);
        }
    }
}

impl Elements<'_> {
    #[inline(always)]
    fn narrow<G: Widen>(self, factors: &Factors, gradients: &[G], next: &Elements<'_>) {
        let (mut state, none) = (self.state, &mut [(); BLOCK][..gradients.len()]);
        match self.out {
            None => sweep(factors, gradients, &mut state, none, next),
            Some(ParamsOut::Bf16(out)) => {
                sweep(factors, gradients, &mut state, out, next);
            }
            Some(ParamsOut::F16(out)) => {
                sweep(factors, gradients, &mut state, none, next);
                out.convert_from_f32_slice(state[0]);
            }
        }
    }

    /// Prefetches all slices at `index`.
    #[inline(always)]
    fn prefetch(&self, index: usize) {
        with_slice!(&self.gradients, Gradients F32 Bf16 F16, slice => prefetch(slice, index));
        self.state.iter().for_each(|slice| prefetch(slice, index));
        if let Some(out) = &self.out {
            with_slice!(out, ParamsOut Bf16 F16, slice => prefetch(slice, index));
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

/// Updates line by line, and prefetches the same line of the next block meanwhile.
///
/// All slices have one length.
#[inline(always)]
fn sweep<G: Widen, O: Narrow>(
    factors: &Factors,
    gradients: &[G],
    [master, moment_1, moment_2]: &mut [&mut [f32]; 3],
    out: &mut [O],
    next: &Elements<'_>,
) {
    let (gradients, gradients_rest) = gradients.as_chunks::<LINE>();
    let (master, master_rest) = master.as_chunks_mut::<LINE>();
    let (moment_1, moment_1_rest) = moment_1.as_chunks_mut::<LINE>();
    let (moment_2, moment_2_rest) = moment_2.as_chunks_mut::<LINE>();
    let (out, out_rest) = out.as_chunks_mut::<LINE>();
    let lines = gradients
        .iter()
        .zip(master)
        .zip(moment_1)
        .zip(moment_2)
        .zip(out);
    for (line, ((((gradient, master), moment_1), moment_2), out)) in lines.enumerate() {
        next.prefetch(line * LINE);
        // Copies do not overlap: the compiler need not check it at every line.
        let (mut param, mut first, mut second) = (*master, *moment_1, *moment_2);
        let mut narrow = *out;
        for lane in 0..LINE {
            let gradient = gradient[lane].widen();
            factors.update(
                gradient,
                &mut param[lane],
                &mut first[lane],
                &mut second[lane],
            );
            narrow[lane] = O::narrow(param[lane]);
        }
        (*master, *moment_1, *moment_2, *out) = (param, first, second, narrow);
    }
    let rest = gradients_rest
        .iter()
        .zip(master_rest)
        .zip(moment_1_rest)
        .zip(moment_2_rest)
        .zip(out_rest);
    for ((((gradient, master), moment_1), moment_2), out) in rest {
        factors.update(gradient.widen(), master, moment_1, moment_2);
        *out = O::narrow(*master);
    }
}

/// A type of gradients, widened to f32.
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

/// A type of parameters that are written for the upload; `()` for none.
trait Narrow: Copy {
    fn narrow(value: f32) -> Self;
}

impl Narrow for () {
    #[inline(always)]
    fn narrow(_: f32) -> Self {}
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
