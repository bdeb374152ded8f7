//! What the memory allows: the same arrays read and written, with next to no arithmetic.

use half::bf16;
use memmap2::MmapMut;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::{Contender, timed};

const CHUNK: usize = 64 * 1024;

/// Elements between those in use and those that are asked for, as in `HostAdamW`.
const BLOCK: usize = 768;

/// Elements whose f32 fill a cache line.
const LINE: usize = 16;

/// Zeroed bytes in huge pages, touched.
pub struct HugeBuffer(MmapMut);

impl HugeBuffer {
    pub fn new(bytes: usize) -> Self {
        let mut map = MmapMut::map_anon(bytes).expect("memory");
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        map.par_chunks_mut(CHUNK * 4)
            .for_each(|chunk| chunk.fill(0));
        Self(map)
    }

    pub fn as_slice<T: bytemuck::Pod>(&self) -> &[T] {
        bytemuck::cast_slice(&self.0)
    }

    fn as_mut_slice<T: bytemuck::Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// A gradient, and what is done with it.
trait Gradient: Copy + Sync {
    /// What is written beside the state.
    type Out: Copy + Send;

    fn value(self) -> f32;

    fn out(self) -> Self::Out;
}

impl Gradient for f32 {
    type Out = ();

    #[inline(always)]
    fn value(self) -> f32 {
        self
    }

    #[inline(always)]
    fn out(self) {}
}

impl Gradient for u16 {
    type Out = u16;

    #[inline(always)]
    fn value(self) -> f32 {
        1.0
    }

    #[inline(always)]
    fn out(self) -> u16 {
        self
    }
}

struct Sweep<'a, G: Gradient> {
    gradients: &'a [G],
    master: &'a mut [f32],
    moment_1: &'a mut [f32],
    moment_2: &'a mut [f32],
    out: &'a mut [G::Out],
    /// Whether the lines of the next block are asked for, as `HostAdamW` does.
    ahead: bool,
}

impl<G: Gradient> WithSimd for Sweep<'_, G> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        if !self.ahead {
            return self.plain();
        }
        let mut rest = self;
        while !rest.master.is_empty() {
            let at = BLOCK.min(rest.master.len());
            let (block, tail) = rest.split_at(at);
            block.prefetching(&tail);
            rest = tail;
        }
    }
}

impl<G: Gradient> Sweep<'_, G> {
    #[inline(always)]
    fn plain(self) {
        let arrays = self
            .gradients
            .iter()
            .zip(self.master)
            .zip(self.moment_1)
            .zip(self.moment_2)
            .zip(self.out);
        for ((((gradient, master), first), second), out) in arrays {
            *master += gradient.value();
            *first += 1.0;
            *second += 1.0;
            *out = gradient.out();
        }
    }

    /// By lines, copied so that the compiler sees that they do not overlap. Whole lines only.
    #[inline(always)]
    fn prefetching(self, next: &Self) {
        let lines = self
            .gradients
            .as_chunks::<LINE>()
            .0
            .iter()
            .zip(self.master.as_chunks_mut::<LINE>().0)
            .zip(self.moment_1.as_chunks_mut::<LINE>().0)
            .zip(self.moment_2.as_chunks_mut::<LINE>().0)
            .zip(self.out.as_chunks_mut::<LINE>().0);
        for (line, ((((gradients, master), moment_1), moment_2), out)) in lines.enumerate() {
            prefetch(next.gradients, line * LINE);
            prefetch(next.master, line * LINE);
            prefetch(next.moment_1, line * LINE);
            prefetch(next.moment_2, line * LINE);
            prefetch(next.out, line * LINE);
            let (mut param, mut first, mut second) = (*master, *moment_1, *moment_2);
            for lane in 0..LINE {
                param[lane] += gradients[lane].value();
                first[lane] += 1.0;
                second[lane] += 1.0;
            }
            (*master, *moment_1, *moment_2) = (param, first, second);
            *out = gradients.map(G::out);
        }
    }

    #[inline(always)]
    fn split_at(self, at: usize) -> (Self, Self) {
        let (gradients, gradients_tail) = self.gradients.split_at(at);
        let (master, master_tail) = self.master.split_at_mut(at);
        let (moment_1, moment_1_tail) = self.moment_1.split_at_mut(at);
        let (moment_2, moment_2_tail) = self.moment_2.split_at_mut(at);
        let (out, out_tail) = self.out.split_at_mut(at);
        let head = Self {
            gradients,
            master,
            moment_1,
            moment_2,
            out,
            ..self
        };
        let tail = Self {
            gradients: gradients_tail,
            master: master_tail,
            moment_1: moment_1_tail,
            moment_2: moment_2_tail,
            out: out_tail,
            ..self
        };
        (head, tail)
    }
}

#[inline(always)]
fn prefetch<T>(slice: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(element) = slice.get(index).filter(|_| size_of::<T>() > 0) {
        safe_arch::prefetch_t0(element);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, index);
}

/// One pass over all arrays, as `HostAdamW` cuts and spreads it.
fn pass<G: Gradient>(gradients: &[G], state: [&mut [f32]; 3], out: &mut [G::Out], ahead: bool) {
    let arch = Arch::new();
    let [master, moment_1, moment_2] = state;
    gradients
        .par_chunks(CHUNK)
        .zip(master.par_chunks_mut(CHUNK))
        .zip(moment_1.par_chunks_mut(CHUNK))
        .zip(moment_2.par_chunks_mut(CHUNK))
        .zip(out.par_chunks_mut(CHUNK))
        .for_each(|((((gradients, master), moment_1), moment_2), out)| {
            arch.dispatch(Sweep {
                gradients,
                master,
                moment_1,
                moment_2,
                out,
                ahead,
            });
        });
}

/// Reads four f32 arrays and writes three of them; `ahead` asks for memory before it is used.
pub fn f32_in(elements: usize, ahead: bool) -> Contender {
    let gradients = HugeBuffer::new(elements * 4);
    let mut state = [0; 3].map(|_| HugeBuffer::new(elements * 4));
    let mut out = vec![(); elements];
    timed(move || {
        let state = state.each_mut().map(HugeBuffer::as_mut_slice);
        pass::<f32>(gradients.as_slice(), state, &mut out, ahead);
    })
}

/// The same from the ordinary allocator.
pub fn ordinary_pages(elements: usize) -> Contender {
    let gradients = vec![1e-3; elements];
    let mut state = [1.0; 3].map(|value| vec![value; elements]);
    let mut out = vec![(); elements];
    timed(move || {
        let state = state.each_mut().map(Vec::as_mut_slice);
        pass::<f32>(&gradients, state, &mut out, false);
    })
}

/// Reads a 16-bit and three f32 arrays, writes the three and another 16-bit one.
pub fn bf16_in_out(elements: usize, ahead: bool) -> Contender {
    let gradients = vec![bf16::ONE.to_bits(); elements];
    let mut out = vec![1u16; elements];
    let mut state = [0; 3].map(|_| HugeBuffer::new(elements * 4));
    timed(move || {
        let state = state.each_mut().map(HugeBuffer::as_mut_slice);
        pass::<u16>(&gradients, state, &mut out, ahead);
    })
}
