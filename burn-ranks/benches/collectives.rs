//! Collectives between threads beside a copy of the same buffer. Throughput counts one rank's whole
//! buffer, so that an all-reduce as fast as the copy would move as many bytes through the machine
//! as `memcpy` does.
//!
//! Buffers go round: what a collective gives is the next one's buffer.
#![allow(missing_docs)] // criterion_group

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use burn_ranks::{
    BufferDtype, GroupOptions, HostBuffer, ProcessGroup, ReduceOp, Split, ThreadGroup,
};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// Elements of a bucket.
const ELEMENTS: usize = 1 << 23;

/// What one rank does with a buffer of its group.
type Step = fn(&ThreadGroup, HostBuffer) -> HostBuffer;

fn all_reduce(group: &ThreadGroup, buffer: HostBuffer) -> HostBuffer {
    group
        .all_reduce("", ReduceOp::Mean, buffer)
        .expect("no rank fails")
}

fn reduce_scatter(group: &ThreadGroup, buffer: HostBuffer) -> HostBuffer {
    let part = group.reduce_scatter("", ReduceOp::Mean, buffer.clone(), Split::Equal);
    black_box(part.expect("no rank fails"));
    buffer
}

fn all_gather(group: &ThreadGroup, buffer: HostBuffer) -> HostBuffer {
    let part = HostBuffer::zeros(buffer.dtype(), buffer.len() / group.world_size());
    let all = group.all_gather("", part, Split::Equal);
    all.expect("no rank fails")
}

fn barrier(group: &ThreadGroup, buffer: HostBuffer) -> HostBuffer {
    group.barrier("").expect("no rank fails");
    buffer
}

/// Time of `iterations` steps on the slowest rank.
fn time(world_size: usize, dtype: BufferDtype, step: Step, iterations: u64) -> Duration {
    let times = ThreadGroup::spawn(world_size, GroupOptions::default(), |group| {
        let mut buffer = step(&group, HostBuffer::from_f32(dtype, vec![1.0; ELEMENTS]));
        let start = Instant::now();
        for _ in 0..iterations {
            buffer = step(&group, buffer);
        }
        start.elapsed()
    });
    times
        .expect("no rank fails")
        .into_iter()
        .max()
        .unwrap_or_default()
}

fn collectives(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("collectives");
    group
        .sample_size(10)
        .measurement_time(Duration::from_secs(4));
    group.throughput(Throughput::Bytes(4 * ELEMENTS as u64));
    let (source, mut target) = (vec![1.0_f32; ELEMENTS], vec![0.0_f32; ELEMENTS]);
    group.bench_function("memcpy f32", |bencher| {
        bencher.iter(|| black_box(&mut target).copy_from_slice(black_box(&source)));
    });
    let steps: [(&str, Step); 3] = [
        ("all_reduce", all_reduce),
        ("reduce_scatter and a copy", reduce_scatter),
        ("all_gather", all_gather),
    ];
    for world_size in [2, 4] {
        for (name, step) in steps {
            for dtype in [BufferDtype::F32, BufferDtype::Bf16] {
                group.throughput(Throughput::Bytes((dtype.size_bytes() * ELEMENTS) as u64));
                group.bench_function(
                    BenchmarkId::new(format!("{name} {dtype}"), world_size),
                    |bencher| {
                        bencher.iter_custom(|iterations| time(world_size, dtype, step, iterations));
                    },
                );
            }
        }
    }
    group.finish();

    let mut group = criterion.benchmark_group("latency");
    group
        .sample_size(10)
        .measurement_time(Duration::from_secs(2));
    for world_size in [2, 4] {
        group.bench_function(BenchmarkId::new("barrier", world_size), |bencher| {
            bencher
                .iter_custom(|iterations| time(world_size, BufferDtype::F32, barrier, iterations));
        });
    }
    group.finish();
}

criterion_group!(benches, collectives);
criterion_main!(benches);
