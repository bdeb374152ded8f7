//! Results and bytes.

use std::{sync::Mutex, time::Duration};

use burn_zero::{
    GroupOptions, HostBuffer, ProcessGroup, ReduceOp, SingleRank, ThreadGroup, ZeroError,
    group::{Agree, BufferDtype, Operation, Pending, Split},
};
use proptest::prelude::*;

use crate::support::{buffer, every_collective, part, reduced, start_all_reduce};

fn spawn<R: Send>(world_size: usize, rank: impl Fn(ThreadGroup) -> R + Sync) -> Vec<R> {
    ThreadGroup::spawn(world_size, GroupOptions::default(), rank).expect("no rank fails")
}

#[test]
fn every_collective_is_its_definition_bit_for_bit() {
    for world_size in [1, 2, 3, 4, 5, 7] {
        for digest in spawn(world_size, |group| every_collective(&group)) {
            digest.unwrap();
        }
    }
}

#[test]
fn one_thread_is_a_single_rank() {
    let threads = spawn(1, |group| every_collective(&group).unwrap());
    assert_eq!(threads, [every_collective(&SingleRank::new()).unwrap()]);
}

#[test]
fn late_ranks_do_not_change_a_bit() {
    let run = |delays: [u64; 3]| {
        spawn(3, |group| {
            let mut results = Vec::new();
            for step in 0..5 {
                std::thread::sleep(Duration::from_millis(delays[(group.rank() + step) % 3]));
                let values = buffer(BufferDtype::Bf16, group.rank(), 4099);
                results.push(group.all_reduce("step", ReduceOp::Mean, values).unwrap());
            }
            results
        })
    };
    assert_eq!(run([0, 0, 0]), run([9, 0, 3]));
    assert_eq!(run([0, 0, 0]), run([0, 7, 1]));
}

#[test]
fn started_collectives_run_in_order_while_the_rank_goes_on() {
    let results = spawn(3, |group| {
        let pending: Vec<_> = (0..20)
            .map(|bucket| {
                let values = vec![(group.rank() * 100 + bucket) as f32; bucket * 50];
                start_all_reduce(
                    &group,
                    &format!("bucket {bucket}"),
                    ReduceOp::Sum,
                    values.into(),
                )
            })
            .collect();
        pending
            .into_iter()
            .map(|pending| pending.wait().unwrap())
            .collect::<Vec<_>>()
    });
    for rank in results {
        for (bucket, sum) in rank.into_iter().enumerate() {
            assert_eq!(sum, vec![(300 + 3 * bucket) as f32; bucket * 50].into());
        }
    }
}

#[test]
fn a_handle_says_whether_it_is_done() {
    spawn(2, |group| {
        if group.rank() == 1 {
            std::thread::sleep(Duration::from_millis(60));
        }
        let pending = start_all_reduce(&group, "late", ReduceOp::Sum, vec![1.0; 8].into());
        if group.rank() == 0 {
            assert!(!pending.wait_for(Duration::from_millis(5)));
        }
        assert!(pending.wait_for(Duration::from_secs(20)) && pending.is_done());
        assert_eq!(pending.wait().unwrap(), vec![2.0; 8].into());
    });
}

/// What is given from elsewhere meanwhile comes behind the whole job.
#[test]
fn a_job_makes_its_collectives_without_others_in_between() {
    let results = spawn(3, |group| {
        let job = Pending::start(&group, |ranks| {
            let sum = ranks.all_reduce("first", ReduceOp::Sum, vec![1.0; 3].into())?;
            std::thread::sleep(Duration::from_millis(20));
            ranks.broadcast("second", 2, sum)
        });
        let behind = start_all_reduce(&group, "third", ReduceOp::Sum, vec![2.0; 3].into());
        (behind.wait().unwrap(), job.is_done(), job.wait().unwrap())
    });
    let expected = (vec![6.0; 3].into(), true, vec![3.0; 3].into());
    assert!(results.into_iter().all(|found| found == expected));
}

#[test]
fn a_group_is_used_as_an_object_from_many_threads() {
    let groups = Mutex::new(Vec::<std::sync::Arc<dyn ProcessGroup>>::new());
    spawn(2, |group| {
        let group: std::sync::Arc<dyn ProcessGroup> = std::sync::Arc::new(group);
        groups.lock().unwrap().push(group.clone());
        std::thread::spawn(move || group.barrier("elsewhere"))
            .join()
            .unwrap()
            .unwrap();
    });
}

#[test]
fn bytes_sent_are_the_formulas() {
    let own_bytes = |rank: usize| 700 * rank as u64 + 3;
    for world_size in [1, 2, 3, 4] {
        let elements = 12 * 100;
        let traffic = spawn(world_size, |group| {
            let own = elements / world_size;
            let values = || HostBuffer::zeros(BufferDtype::Bf16, elements);
            group.all_reduce("a", ReduceOp::Mean, values()).unwrap();
            group
                .reduce_scatter("b", ReduceOp::Mean, values(), Split::Equal)
                .unwrap();
            group
                .all_gather("c", part(&values(), 0..own), Split::Equal)
                .unwrap();
            group.broadcast("d", 0, values()).unwrap();
            group.barrier("e").unwrap();
            let own = vec![0; 2 * own_bytes(group.rank()) as usize];
            group.gather_bytes_to("f", world_size - 1, own).unwrap();
            (group.rank(), group.traffic())
        });
        let shard = (elements - elements / world_size) as u64;
        let to_the_last = |rank| match rank + 1 == world_size {
            true => 0,
            false => 2 * own_bytes(rank),
        };
        for (rank, traffic) in traffic {
            for (operation, expected) in [
                (Operation::AllReduce, 2 * shard),
                (Operation::ReduceScatter, shard),
                (Operation::AllGather, shard),
                (
                    Operation::Broadcast,
                    if rank == 0 { 2 * shard } else { shard },
                ),
                (Operation::Barrier, 0),
            ] {
                let sent = traffic.of(operation);
                assert_eq!(
                    (sent.calls, sent.elements, sent.data_bytes),
                    (1, expected, 2 * expected)
                );
            }
            // Once, to one rank.
            let sent = traffic.of(Operation::GatherBytesTo);
            assert_eq!((sent.calls, sent.data_bytes), (1, to_the_last(rank)));
            assert_eq!(traffic.total().calls, 6);
        }
    }
}

#[test]
fn texts_that_differ_are_shown_on_all_ranks() {
    let errors = spawn(3, |group| {
        let text = if group.rank() == 2 {
            "stage 2"
        } else {
            "stage 1"
        };
        group.agree_equal("ZeRO settings", text).unwrap_err()
    });
    assert!(matches!(
        &errors[0],
        ZeroError::Disagreement {
            rank: 0,
            peer: 2,
            ..
        }
    ));
    assert!(matches!(
        &errors[2],
        ZeroError::Disagreement {
            rank: 2,
            peer: 0,
            ..
        }
    ));
    assert_eq!(
        errors[0].to_string(),
        "ZeRO settings: rank 0 has `stage 1`, but rank 2 has `stage 2`; all ranks must have the same"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_split_of_any_buffer(
        counts in prop::collection::vec(0_usize..40, 1..8),
        dtype in prop::sample::select(crate::support::DTYPES.to_vec()),
        op in prop::sample::select(vec![ReduceOp::Sum, ReduceOp::Mean]),
    ) {
        let (world_size, elements) = (counts.len(), counts.iter().sum());
        let expected = reduced(dtype, op, world_size, elements);
        for all in spawn(world_size, |group| {
            let split = Split::Counts(counts.clone());
            let values = buffer(dtype, group.rank(), elements);
            let own = group.reduce_scatter("scatter", op, values, split.clone())?;
            group.all_gather("gather", own, split)
        }) {
            prop_assert_eq!(&all.unwrap(), &expected);
        }
    }
}
