//! What the memory allows: the same arrays read and written, with next to no arithmetic.

use half::bf16;
use memmap2::MmapMut;
use pulp::{Arch, Simd, WithSimd};
use rayon::prelude::*;

use super::{Contender, timed};

const CHUNK: usize = 64 * 1024;

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

struct Sweep<'a> {
    gradients: &'a [f32],
    master: &'a mut [f32],
    moment_1: &'a mut [f32],
    moment_2: &'a mut [f32],
}

impl WithSimd for Sweep<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self {
            gradients,
            master,
            moment_1,
            moment_2,
        } = self;
        for (((gradient, master), first), second) in
            gradients.iter().zip(master).zip(moment_1).zip(moment_2)
        {
            *master += *gradient;
            *first += 1.0;
            *second += 1.0;
        }
    }
}

struct LowSweep<'a> {
    gradients: &'a [u16],
    master: &'a mut [f32],
    moment_1: &'a mut [f32],
    moment_2: &'a mut [f32],
    out: &'a mut [u16],
}

impl WithSimd for LowSweep<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let Self {
            gradients,
            master,
            moment_1,
            moment_2,
            out,
        } = self;
        let arrays = gradients
            .iter()
            .zip(master)
            .zip(moment_1)
            .zip(moment_2)
            .zip(out);
        for ((((gradient, master), first), second), out) in arrays {
            *master += 1.0;
            *first += 1.0;
            *second += 1.0;
            *out = *gradient;
        }
    }
}

fn sweep(gradients: &[f32], master: &mut [f32], moment_1: &mut [f32], moment_2: &mut [f32]) {
    let arch = Arch::new();
    gradients
        .par_chunks(CHUNK)
        .zip(master.par_chunks_mut(CHUNK))
        .zip(moment_1.par_chunks_mut(CHUNK))
        .zip(moment_2.par_chunks_mut(CHUNK))
        .for_each(|(((gradients, master), moment_1), moment_2)| {
            arch.dispatch(Sweep {
                gradients,
                master,
                moment_1,
                moment_2,
            });
        });
}

/// Reads four f32 arrays and writes three of them.
pub fn f32_in(elements: usize) -> Contender {
    let gradients = HugeBuffer::new(elements * 4);
    let [mut master, mut moment_1, mut moment_2] = [0; 3].map(|_| HugeBuffer::new(elements * 4));
    timed(move || {
        sweep(
            gradients.as_slice(),
            master.as_mut_slice(),
            moment_1.as_mut_slice(),
            moment_2.as_mut_slice(),
        );
    })
}

/// The same from the ordinary allocator.
pub fn ordinary_pages(elements: usize) -> Contender {
    let gradients = vec![1e-3; elements];
    let [mut master, mut moment_1, mut moment_2] = [1.0; 3].map(|value| vec![value; elements]);
    timed(move || sweep(&gradients, &mut master, &mut moment_1, &mut moment_2))
}

/// Reads a 16-bit and three f32 arrays, writes the three and another 16-bit one.
pub fn bf16_in_out(elements: usize) -> Contender {
    let gradients = vec![bf16::ONE.to_bits(); elements];
    let mut out = vec![1u16; elements];
    let [mut master, mut moment_1, mut moment_2] = [0; 3].map(|_| HugeBuffer::new(elements * 4));
    timed(move || {
        let arch = Arch::new();
        gradients
            .par_chunks(CHUNK)
            .zip(master.as_mut_slice::<f32>().par_chunks_mut(CHUNK))
            .zip(moment_1.as_mut_slice::<f32>().par_chunks_mut(CHUNK))
            .zip(moment_2.as_mut_slice::<f32>().par_chunks_mut(CHUNK))
            .zip(out.par_chunks_mut(CHUNK))
            .for_each(|((((gradients, master), moment_1), moment_2), out)| {
                arch.dispatch(LowSweep {
                    gradients,
                    master,
                    moment_1,
                    moment_2,
                    out,
                });
            });
    })
}
