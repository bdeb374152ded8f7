//! What CubeCL's memory pools reserve for a step.
//!
//! A pool has pages of one size, and a tensor gets a slice of the first page with room for it.
//! Pages stay reserved until `Backend::memory_cleanup`, so what counts for a device is the pages,
//! not the tensors. Follows `MemoryManagement` of cubecl-runtime 0.10 with its default,
//! `MemoryConfiguration::SubSlices`.

use crate::allocator::Allocator;
use crate::classes::Classes;
use crate::estimate::Estimate;

/// The memory pools of a device of CubeCL 0.10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CubePools {
    /// Bytes of the largest page. A larger tensor cannot be allocated.
    pub max_page_bytes: u64,
    /// Each slice begins at a multiple of so many bytes.
    pub alignment: u64,
}

impl CubePools {
    /// The pools of a CUDA device with `memory_bytes` of memory: a page has a quarter of it at
    /// most.
    pub fn cuda(memory_bytes: u64) -> Self {
        Self {
            max_page_bytes: memory_bytes / 4,
            alignment: 512,
        }
    }

    /// The bytes of a page of each pool and of its largest slice, the smallest first.
    fn sizes(&self) -> Vec<(u64, u64)> {
        const LEAST: u64 = 32 << 20;
        let aligned = self.max_page_bytes / self.alignment * self.alignment;
        let mut sizes = vec![(aligned, aligned)];
        let mut page = self.max_page_bytes;
        while page >= LEAST {
            page = (page / 4).next_multiple_of(self.alignment);
            sizes.push((page, page >> sizes.len()));
        }
        sizes.reverse();
        sizes
    }
}

/// The memory of a device, and how it is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Bytes of the whole memory.
    pub bytes: u64,
    /// The pools that tensors are in; `None` where each is allocated by itself.
    pub pools: Option<CubePools>,
}

impl DeviceMemory {
    /// The memory of a CUDA device, which CubeCL allocates in pages.
    pub fn cuda(bytes: u64) -> Self {
        Self {
            bytes,
            pools: Some(CubePools::cuda(bytes)),
        }
    }

    /// Memory of which each tensor takes its own bytes, as on the heap.
    pub fn heap(bytes: u64) -> Self {
        Self { bytes, pools: None }
    }

    /// Bytes of the memory that a step needs; `u64::MAX` if a tensor is larger than a page.
    pub fn needed(&self, estimate: &Estimate) -> u64 {
        match &self.pools {
            Some(pools) => estimate.reserved_bytes(pools).unwrap_or(u64::MAX),
            None => estimate.peak_bytes,
        }
    }
}

impl Estimate {
    /// The bytes that these pools reserve for the step once it has run a few times; `None` if a
    /// tensor is larger than a page.
    ///
    /// Parameters are taken to be allocated one after the other. What autotuning allocates is not
    /// counted.
    pub fn reserved_bytes(&self, pools: &CubePools) -> Option<u64> {
        let mut reserved = Reserved::new(pools);
        let classes = Classes::new(&self.recording);
        classes.allocate_in(&self.shares, &mut reserved)?;
        let (buckets, shards) = self.shares.added_bytes(classes.trained_bytes());
        Some(reserved.bytes() + buckets + shards + classes.kept_parts(&self.shares))
    }
}

/// A slice of a page.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slice {
    pool: usize,
    page: usize,
    start: u64,
}

/// A part of a page.
#[derive(Clone, Copy, Debug)]
struct Part {
    start: u64,
    bytes: u64,
    is_free: bool,
}

/// A pool.
struct Pool {
    page_bytes: u64,
    /// Bytes of its largest slice.
    slice_bytes: u64,
    pages: Vec<Page>,
}

/// A page.
struct Page {
    /// In order.
    parts: Vec<Part>,
    /// Bytes of its largest free part.
    room_bytes: u64,
}

impl Page {
    fn update_room(&mut self) {
        let free = self.parts.iter().filter(|part| part.is_free);
        self.room_bytes = free.map(|part| part.bytes).max().unwrap_or(0);
    }
}

impl Pool {
    fn accepts(&self, bytes: u64) -> bool {
        // A page may be taken whole if less than a fifth of it is lost.
        let rest = self.page_bytes.checked_sub(bytes);
        self.slice_bytes >= bytes || rest.is_some_and(|rest| rest * 5 < self.page_bytes)
    }
}

/// What the pools of a device have reserved.
struct Reserved {
    pools: Vec<Pool>,
    alignment: u64,
}

impl Reserved {
    fn new(pools: &CubePools) -> Self {
        let pool = |(page_bytes, slice_bytes)| Pool {
            page_bytes,
            slice_bytes,
            pages: Vec::new(),
        };
        Self {
            pools: pools.sizes().into_iter().map(pool).collect(),
            alignment: pools.alignment,
        }
    }

    fn bytes(&self) -> u64 {
        let pools = self.pools.iter();
        pools
            .map(|pool| pool.page_bytes * pool.pages.len() as u64)
            .sum()
    }
}

impl Allocator for Reserved {
    type Block = Slice;

    /// A slice of the first free part that is large enough, of a new page if there is none.
    fn allocate(&mut self, bytes: u64) -> Option<Slice> {
        let pool = self.pools.iter().position(|pool| pool.accepts(bytes))?;
        let Pool {
            page_bytes, pages, ..
        } = &mut self.pools[pool];
        let bytes = bytes.next_multiple_of(self.alignment);
        let has_room = |page: &Page| page.room_bytes >= bytes;
        let page = pages.iter().position(has_room).unwrap_or_else(|| {
            let whole = Part {
                start: 0,
                bytes: *page_bytes,
                is_free: true,
            };
            pages.push(Page {
                parts: vec![whole],
                room_bytes: *page_bytes,
            });
            pages.len() - 1
        });
        let found = &mut pages[page];
        let parts = &mut found.parts;
        let fits = |part: &Part| part.is_free && part.bytes >= bytes;
        let part = parts.iter().position(fits)?;
        let Part {
            start, bytes: all, ..
        } = parts[part];
        parts[part] = Part {
            start,
            bytes,
            is_free: false,
        };
        if all > bytes {
            let rest = Part {
                start: start + bytes,
                bytes: all - bytes,
                is_free: true,
            };
            parts.insert(part + 1, rest);
        }
        if all == found.room_bytes {
            found.update_room();
        }
        Some(Slice { pool, page, start })
    }

    /// Frees a slice, and joins it with free neighbours.
    fn free(&mut self, Slice { pool, page, start }: Slice) {
        let Page { parts, room_bytes } = &mut self.pools[pool].pages[page];
        let Ok(freed) = parts.binary_search_by_key(&start, |part| part.start) else {
            return;
        };
        parts[freed].is_free = true;
        *room_bytes = parts[freed].bytes.max(*room_bytes);
        for before in [Some(freed), freed.checked_sub(1)].into_iter().flatten() {
            if let Some(next) = parts.get(before + 1).copied()
                && next.is_free
                && parts[before].is_free
            {
                parts[before].bytes += next.bytes;
                parts.remove(before + 1);
                *room_bytes = parts[before].bytes.max(*room_bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::tensor::Tensor;

    use super::*;
    use crate::{Meta, MetaDevice, estimate_run};

    const MIB: u64 = 1 << 20;

    fn reserved(device: u16, elements: &[usize], pools: CubePools) -> Option<u64> {
        let device = MetaDevice::cuda(device);
        let (estimate, _) = estimate_run(device, || {
            let tensors = elements.iter();
            let tensors = tensors.map(|&elements| Tensor::<Meta, 1>::empty([elements], &device));
            tensors.collect::<Vec<_>>()
        });
        estimate.reserved_bytes(&pools)
    }

    #[test]
    fn pages_are_those_of_cubecl() {
        let sizes = CubePools::cuda(24 << 30).sizes().into_iter();
        let sizes: Vec<_> = sizes
            .map(|(page, slice)| (page / MIB, slice / MIB))
            .collect();
        let expected = [(24, 1), (96, 12), (384, 96), (1536, 768), (6144, 6144)];
        assert_eq!(sizes, expected);
    }

    #[test]
    fn a_tensor_takes_a_page() {
        let pools = CubePools::cuda(24 << 30);
        let elements = |mib: usize| mib << 18;
        assert_eq!(reserved(100, &[1], pools), Some(24 * MIB));
        assert_eq!(reserved(101, &[elements(100)], pools), Some(1536 * MIB));
        // Eight of them share the page, and a whole page is taken by what is nearly as large.
        assert_eq!(reserved(102, &[elements(190); 8], pools), Some(1536 * MIB));
        assert_eq!(reserved(103, &[elements(320)], pools), Some(384 * MIB));
        let too_large = elements(6145);
        assert_eq!(reserved(104, &[too_large], pools), None);
    }
}
