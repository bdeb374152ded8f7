//! A rank's worker: collectives, made of a transport's movements.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use bytemuck::{Pod, Zeroable};

use super::{
    Call, GroupFault, HostBuffer, Output, ReduceOp, Task,
    buffer::{Element, with_values},
    queue::{Job, Next, Queue},
    transport::Transport,
};

/// Runs a rank's collectives until its group is dropped or lost.
pub(crate) fn work<T: Transport>(transport: &mut T, queue: &Queue) {
    let worked = catch_unwind(AssertUnwindSafe(|| run(transport, queue)));
    let fault = match worked {
        Ok(Ok(calls)) => return transport.leave(calls),
        Ok(Err(fault)) => fault,
        Err(panic) => GroupFault::PeerPanicked {
            rank: transport.rank(),
            message: panic_message(&*panic),
        },
    };
    transport.spread(&fault);
    queue.fail(fault);
}

/// The message of a caught panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Runs collectives to the end and counts them.
fn run<T: Transport>(transport: &mut T, queue: &Queue) -> Result<u64, GroupFault> {
    let mut calls = 0;
    let patience = transport.patience();
    loop {
        let job = match queue.next(patience) {
            Next::Job(job) => *job,
            Next::Nothing => {
                transport.stay();
                continue;
            }
            Next::End => break,
        };
        let operation = job.call.operation;
        let output = perform(transport, job)?;
        calls += 1;
        queue
            .traffic()
            .lock()
            .record(operation, transport.take_sent());
        queue.finish(output);
    }
    queue.fault().map_or(Ok(calls), Err)
}

fn perform<T: Transport>(transport: &mut T, job: Job) -> Result<Output, GroupFault> {
    let Job {
        call,
        task,
        offsets,
    } = job;
    let calls = transport.announce(&call)?;
    call.check(transport.rank(), &calls)?;
    let output = match task {
        Task::Barrier => Output::Nothing,
        Task::GatherBytes(bytes) => Output::Bytes(gather_bytes(transport, &call, &calls, bytes)?),
        Task::GatherBytesTo { root, bytes } => {
            let offsets = lengths(&calls);
            let all = transport.gather(&call, root, &Arc::new(bytes), &offsets)?;
            match transport.rank() == root {
                true => Output::Bytes(cut(&all, &offsets)),
                false => Output::Nothing,
            }
        }
        Task::AllReduce { op, buffer } => Output::Buffer(with_values!(buffer, values =>
            all_reduce(transport, &call, &offsets, op, values)?.into())),
        Task::ReduceScatter { op, buffer, .. } => Output::Buffer(with_values!(buffer, values =>
            transport.reduce_scatter(&call, &Arc::new(values), &offsets, op)?.into())),
        Task::AllGather { part, into, .. } => Output::Buffer(with_values!(part, part =>
            all_gather(transport, &call, &offsets, part, into)?.into())),
        Task::Broadcast { root, buffer } => Output::Buffer(with_values!(buffer, values =>
            broadcast(transport, &call, &offsets, root, values)?.into())),
    };
    Ok(output)
}

/// A reduce-scatter, so that every element is added and rounded by one rank, and an all-gather.
fn all_reduce<T: Transport, E: Element>(
    transport: &mut T,
    call: &Call,
    offsets: &[usize],
    op: ReduceOp,
    values: Vec<E>,
) -> Result<Vec<E>, GroupFault> {
    let values = Arc::new(values);
    let part = transport.reduce_scatter(call, &values, offsets, op)?;
    transport.all_gather(call, &Arc::new(part), offsets, || reclaim(values))
}

fn all_gather<T: Transport, E: Element>(
    transport: &mut T,
    call: &Call,
    offsets: &[usize],
    part: Vec<E>,
    into: Option<HostBuffer>,
) -> Result<Vec<E>, GroupFault> {
    let elements = offsets[transport.world_size()];
    transport.all_gather(call, &Arc::new(part), offsets, || {
        into.and_then(E::unwrap)
            .unwrap_or_else(|| vec![E::zeroed(); elements])
    })
}

/// A scatter and an all-gather: the root sends its buffer twice, whatever the world size.
fn broadcast<T: Transport, E: Element>(
    transport: &mut T,
    call: &Call,
    offsets: &[usize],
    root: usize,
    values: Vec<E>,
) -> Result<Vec<E>, GroupFault> {
    let values = Arc::new(values);
    let part = transport.scatter(call, root, &values, offsets)?;
    transport.all_gather(call, &Arc::new(part), offsets, || reclaim(values))
}

fn gather_bytes<T: Transport>(
    transport: &mut T,
    call: &Call,
    calls: &[Call],
    bytes: Vec<u8>,
) -> Result<Vec<Vec<u8>>, GroupFault> {
    let offsets = lengths(calls);
    let elements = offsets[calls.len()];
    let all = transport.all_gather(call, &Arc::new(bytes), &offsets, || vec![0; elements])?;
    Ok(cut(&all, &offsets))
}

/// Where each rank's byte string begins, and the end: the lengths have come with the calls.
fn lengths(calls: &[Call]) -> Vec<usize> {
    let mut offsets = vec![0];
    for call in calls {
        offsets.push(offsets[offsets.len() - 1] + call.elements as usize);
    }
    offsets
}

fn cut(all: &[u8], offsets: &[usize]) -> Vec<Vec<u8>> {
    let parts = offsets.windows(2);
    parts.map(|part| all[part[0]..part[1]].to_vec()).collect()
}

/// The memory of a buffer that other ranks have read.
fn reclaim<P: Pod + Zeroable>(values: Arc<Vec<P>>) -> Vec<P> {
    Arc::try_unwrap(values).unwrap_or_else(|shared| vec![P::zeroed(); shared.len()])
}
