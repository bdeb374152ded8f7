//! Collectives whose results threads and MPI processes must agree on, and what they must be.
#![allow(dead_code)] // each test uses its part

use burn_ranks::{BufferDtype, HostBuffer, Pending, ProcessGroup, RanksError, ReduceOp, Split};

pub const DTYPES: [BufferDtype; 3] = [BufferDtype::F32, BufferDtype::Bf16, BufferDtype::F16];

/// Lengths around chunk and world-size boundaries; zero, one, fewer than ranks, and parts of more
/// than two blocks of 1024.
pub const LENGTHS: [usize; 7] = [0, 1, 3, 8, 29, 64, 4100];

/// Values whose sum depends on the order in which they are added.
pub fn values(rank: usize, elements: usize) -> Vec<f32> {
    let value = |i: usize| {
        let mixed = (i * 2_654_435_761 + rank * 40_503 + 12_345) % 100_003;
        (mixed as f32 / 100_003.0 - 0.5) * [1.0, 1e3, 1e-3][(i + rank) % 3]
    };
    (0..elements).map(value).collect()
}

pub fn buffer(dtype: BufferDtype, rank: usize, elements: usize) -> HostBuffer {
    HostBuffer::from_f32(dtype, values(rank, elements))
}

/// What reducing must give: added in f32 in the order of ranks, rounded once.
pub fn reduced(dtype: BufferDtype, op: ReduceOp, world_size: usize, elements: usize) -> HostBuffer {
    let mut sum = buffer(dtype, 0, elements).into_f32();
    for rank in 1..world_size {
        let next = buffer(dtype, rank, elements).into_f32();
        sum.iter_mut()
            .zip(next)
            .for_each(|(sum, next)| *sum += next);
    }
    if op == ReduceOp::Mean {
        sum.iter_mut().for_each(|sum| *sum /= world_size as f32);
    }
    HostBuffer::from_f32(dtype, sum)
}

/// Part sizes that differ, with an empty one.
pub fn uneven(world_size: usize, elements: usize) -> Vec<usize> {
    let mut counts = vec![0; world_size];
    for i in 0..elements {
        counts[if i % 3 == 0 {
            world_size - 1
        } else {
            i % world_size
        }] += 1;
    }
    counts
}

pub fn part(buffer: &HostBuffer, at: std::ops::Range<usize>) -> HostBuffer {
    match buffer {
        HostBuffer::F32(values) => values[at].to_vec().into(),
        HostBuffer::Bf16(values) => values[at].to_vec().into(),
        HostBuffer::F16(values) => values[at].to_vec().into(),
    }
}

/// An all-reduce that nobody waits for yet.
pub fn start_all_reduce(
    group: &(impl ProcessGroup + ?Sized),
    label: &str,
    op: ReduceOp,
    buffer: HostBuffer,
) -> Pending<HostBuffer> {
    let label = label.to_owned();
    Pending::start(group, move |ranks| ranks.all_reduce(&label, op, buffer))
}

/// Runs every collective over every type and length, compares with the definition bit for bit and
/// returns a digest of all results.
pub fn every_collective(group: &dyn ProcessGroup) -> Result<u64, RanksError> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let mut digest = Digest::default();
    for dtype in DTYPES {
        for length in LENGTHS {
            for op in [ReduceOp::Sum, ReduceOp::Mean] {
                let expected = reduced(dtype, op, world_size, length);
                let label = format!("{dtype} {length} {op}");
                let all = group.all_reduce(&label, op, buffer(dtype, rank, length))?;
                assert_same(&all, &expected);
                digest.add(all.as_bytes());

                let counts = uneven(world_size, length);
                let start: usize = counts[..rank].iter().sum();
                let split = Split::Counts(counts.clone());
                let own =
                    group.reduce_scatter(&label, op, buffer(dtype, rank, length), split.clone())?;
                assert_same(&own, &part(&expected, start..start + counts[rank]));
                digest.add(own.as_bytes());
                assert_same(&group.all_gather(&label, own, split)?, &expected);

                let whole = length * world_size;
                let expected = reduced(dtype, op, world_size, whole);
                let own =
                    group.reduce_scatter(&label, op, buffer(dtype, rank, whole), Split::Equal)?;
                assert_same(&own, &part(&expected, rank * length..(rank + 1) * length));
                let all = group.all_gather(&label, own, Split::Equal)?;
                assert_same(&all, &expected);
                digest.add(all.as_bytes());
            }
            for root in 0..world_size {
                let label = format!("{dtype} {length} from {root}");
                let all = group.broadcast(&label, root, buffer(dtype, rank, length))?;
                assert_same(&all, &buffer(dtype, root, length));
                digest.add(all.as_bytes());
            }
        }
    }
    let strings = group.gather_bytes("strings", vec![rank as u8; 3 * rank])?;
    let expected: Vec<Vec<u8>> = (0..world_size)
        .map(|rank| vec![rank as u8; 3 * rank])
        .collect();
    assert_eq!(strings, expected);
    for root in 0..world_size {
        let string = |rank: usize| vec![rank as u8; 50 * ((rank + root) % world_size)];
        let strings = group.gather_bytes_to("to one", root, string(rank))?;
        let expected = || (0..world_size).map(string).collect();
        assert_eq!(strings, (rank == root).then(expected));
    }
    assert!(group.agree_any("any", rank == world_size - 1)?);
    assert!(!group.agree_any("none", false)?);
    let halves: Vec<_> = (0..world_size).map(|rank| rank as f64 + 0.5).collect();
    assert_eq!(group.gather_f64("numbers", rank as f64 + 0.5)?, halves);
    let sum = group.agree_sum("sum", rank as f64 + 0.5)?;
    assert_eq!(sum, halves.iter().sum::<f64>());
    let own = if rank == 0 { f64::NAN } else { 1.0 };
    assert!(group.agree_sum("nan", own)?.is_nan());
    group.barrier("end")?;
    Ok(digest.0)
}

fn assert_same(left: &HostBuffer, right: &HostBuffer) {
    assert_eq!(left.dtype(), right.dtype());
    assert_eq!(
        left.as_bytes(),
        right.as_bytes(),
        "{left:?} is not {right:?}"
    );
}

#[derive(Default)]
struct Digest(u64);

impl Digest {
    fn add(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = (self.0 ^ u64::from(byte))
                .wrapping_mul(0x0100_0000_01b3)
                .rotate_left(5);
        }
    }
}
