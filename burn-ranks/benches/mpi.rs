//! Collectives between processes, beside a copy of the same buffer. Run as
//!
//! ```text
//! cargo bench --workspace --features burn-ranks/mpi --bench mpi --no-run
//! mpirun --allow-run-as-root --oversubscribe -n 2 target/release/deps/mpi-<hash> [builtin]
//! ```
//!
//! `builtin` times the library's own `MPI_Reduce_scatter_block` and `MPI_Allreduce` instead: they
//! need MPI for themselves. Prints the median of 9 on rank 0, with GB/s of one rank's whole buffer.

use std::{
    env,
    time::{Duration, Instant},
};

use burn_ranks::{BufferDtype, HostBuffer, MpiGroup, ProcessGroup, ReduceOp, Split};
use mpi::{collective::SystemOperation, traits::*};

const ELEMENTS: usize = 1 << 23;

fn main() {
    match env::args().any(|argument| argument == "builtin") {
        true => builtin(),
        false => ours(),
    }
}

fn report(rank: usize, name: &str, bytes: usize, mut step: impl FnMut()) {
    step();
    let mut times: Vec<Duration> = (0..9)
        .map(|_| {
            let start = Instant::now();
            step();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    if rank == 0 {
        let seconds = times[4].as_secs_f64();
        println!(
            "{name:<40} {:>10.3} ms {:>7.2} GB/s",
            seconds * 1e3,
            bytes as f64 / seconds / 1e9
        );
    }
}

fn ours() {
    let group = MpiGroup::init().expect("MPI starts");
    let rank = group.rank();
    let (source, mut target) = (vec![1.0_f32; ELEMENTS], vec![0.0_f32; ELEMENTS]);
    report(rank, "memcpy f32", 4 * ELEMENTS, || {
        std::hint::black_box(&mut target).copy_from_slice(&source)
    });
    for dtype in [BufferDtype::F32, BufferDtype::Bf16] {
        let bytes = dtype.size_bytes() * ELEMENTS;
        let mut buffer = Some(HostBuffer::zeros(dtype, ELEMENTS));
        report(rank, &format!("all_reduce {dtype}"), bytes, || {
            let whole = buffer.take().expect("it comes back");
            buffer = group.all_reduce("", ReduceOp::Sum, whole).ok();
        });
        // Buffers are made outside of what is timed.
        let mut buffers = vec![HostBuffer::zeros(dtype, ELEMENTS); 10];
        report(rank, &format!("reduce_scatter {dtype}"), bytes, || {
            let whole = buffers.pop().expect("one a step");
            group
                .reduce_scatter("", ReduceOp::Sum, whole, Split::Equal)
                .expect("no rank fails");
        });
        report(rank, &format!("all_gather {dtype}"), bytes, || {
            let part = HostBuffer::zeros(dtype, ELEMENTS / group.world_size());
            let gathered = group.all_gather("", part, Split::Equal);
            gathered.expect("no rank fails");
        });
    }
    report(rank, "1000 barriers (only the fingerprints)", 0, || {
        (0..1000).for_each(|_| {
            group
                .barrier("gradients of bucket 3")
                .expect("no rank fails")
        });
    });
}

fn builtin() {
    let universe = mpi::initialize().expect("MPI starts");
    let world = universe.world();
    let (rank, size) = (world.rank() as usize, world.size() as usize);
    let (whole, mut all, mut part) = (
        vec![1.0_f32; ELEMENTS],
        vec![0.0_f32; ELEMENTS],
        vec![0.0_f32; ELEMENTS / size],
    );
    report(rank, "MPI_Allreduce f32", 4 * ELEMENTS, || {
        world.all_reduce_into(&whole[..], &mut all[..], SystemOperation::sum());
    });
    report(rank, "MPI_Reduce_scatter_block f32", 4 * ELEMENTS, || {
        world.reduce_scatter_block_into(&whole[..], &mut part[..], SystemOperation::sum());
    });
    report(rank, "MPI_Allgather f32", 4 * ELEMENTS, || {
        world.all_gather_into(&part[..], &mut all[..])
    });
    report(rank, "1000 MPI_Barrier", 0, || {
        (0..1000).for_each(|_| world.barrier())
    });
}
