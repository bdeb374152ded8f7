//! Results and bytes.

use std::{
    sync::{Arc, Barrier, Mutex},
    time::Duration,
};

use burn_ranks::{
    Buffer, BufferDtype, Collective, GroupFault, GroupOptions, HostBuffer, InvalidSetting,
    Operation, Pending, ProcessGroup, RanksError, ReduceOp, SingleRank, Split, ThreadGroup,
    Transfer,
};
use half::{bf16, f16};
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
        (behind.wait().unwrap(), job.wait().unwrap())
    });
    let expected = (vec![6.0; 3].into(), vec![3.0; 3].into());
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
        RanksError::Disagreement {
            rank: 0,
            peer: 2,
            ..
        }
    ));
    assert!(matches!(
        &errors[2],
        RanksError::Disagreement {
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

/// The mean or sum of one value of each rank, as an all-reduce of three elements.
fn reduced_values<E: Copy + Send + Sync>(op: ReduceOp, values: &[E]) -> HostBuffer
where
    HostBuffer: From<Vec<E>>,
{
    let all = spawn(values.len(), |group| {
        let own = vec![values[group.rank()]; 3].into();
        group.all_reduce("values", op, own).unwrap()
    });
    assert!(all.iter().all(|one| *one == all[0]));
    all[0].clone()
}

/// 256 + 1 is not a bf16: adding hop by hop would lose every 1.
#[test]
fn half_precision_is_rounded_once() {
    let values = [256.0, 1.0, 1.0, 1.0, 1.0].map(bf16::from_f32);
    let sum = reduced_values(ReduceOp::Sum, &values);
    assert_eq!(sum, vec![bf16::from_f32(260.0); 3].into());
}

#[test]
fn the_mean_of_large_half_values_does_not_overflow() {
    let large = f16::from_f32(60_000.0);
    assert_eq!(
        reduced_values(ReduceOp::Mean, &[large; 3]),
        vec![large; 3].into()
    );
}

#[test]
fn what_cannot_be_cut_is_refused_before_it_is_sent() {
    let four = ThreadGroup::new(4, GroupOptions::default()).unwrap();
    let buffer = || HostBuffer::zeros(BufferDtype::F32, 10);
    for split in [
        Split::Equal,
        Split::Counts(vec![10, 0]),
        Split::Counts(vec![5, 4, 0, 0]),
        Split::Counts(vec![usize::MAX, 1, 5, 5]),
    ] {
        let error = four[0].reduce_scatter("bucket 3", ReduceOp::Sum, buffer(), split);
        let text = error.unwrap_err().to_string();
        assert!(
            text.contains("reduce_scatter `bucket 3`: the buffer has 10"),
            "{text}"
        );
    }
    let single = SingleRank::new();
    let groups: [&dyn ProcessGroup; 2] = [&four[0], &single];
    for group in groups {
        let ranks = group.world_size();
        let gathered = group.all_gather("x", buffer(), Split::Counts(vec![2; ranks]));
        assert!(matches!(gathered, Err(RanksError::BufferLength(_))));
        let roots = [
            group.broadcast("x", ranks, buffer()).map(drop),
            group.gather_bytes_to("x", ranks, Vec::new()).map(drop),
        ];
        for root in roots {
            let expected = InvalidSetting {
                setting: "root",
                value: ranks.to_string(),
                expected: "a rank of the group",
            };
            assert_eq!(root, Err(expected.into()));
        }
        assert_eq!(group.traffic().total().calls, 0);
    }
}

#[test]
fn one_rank_is_the_identity_and_sends_nothing() {
    let group = SingleRank::new();
    let buffer = HostBuffer::from(vec![1.0, -2.0, f32::INFINITY]);
    let sum = group.all_reduce("a", ReduceOp::Mean, buffer.clone());
    assert_eq!(sum.unwrap(), buffer);
    let own = group.gather_bytes_to("b", 0, vec![1, 2]).unwrap();
    assert_eq!(own, Some(vec![vec![1, 2]]));
    let total = group.traffic().total();
    assert_eq!((total.calls, total.elements, total.data_bytes), (2, 0, 0));
    group.abort("disk full");
    let error = group.barrier("end").unwrap_err();
    assert_eq!(error.to_string(), "rank 0 gave up: disk full");
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

/// A memory that the threads of all ranks see, as they do the devices of one process.
struct Board {
    by_rank: Mutex<Vec<Vec<f32>>>,
    ranks: Barrier,
}

/// Elements that move over the board.
struct OnBoard {
    own: Vec<f32>,
    board: Arc<Board>,
}

impl OnBoard {
    /// Every rank's elements, of which each sends its own.
    fn all(&self, transfer: &mut Transfer<'_>) -> Vec<Vec<f32>> {
        transfer.count(self.own.len() * (transfer.world_size() - 1), self.dtype());
        self.board.by_rank.lock().unwrap()[transfer.rank()] = self.own.clone();
        self.board.ranks.wait();
        let all = self.board.by_rank.lock().unwrap().clone();
        self.board.ranks.wait();
        all
    }
}

impl Buffer for OnBoard {
    fn dtype(&self) -> BufferDtype {
        BufferDtype::F32
    }

    fn elements(&self) -> usize {
        self.own.len()
    }

    fn reduce_scatter(
        self,
        op: ReduceOp,
        offsets: &[usize],
        transfer: &mut Transfer<'_>,
    ) -> Result<Self, GroupFault> {
        let part = offsets[transfer.rank()]..offsets[transfer.rank() + 1];
        let whole = self.all_reduce(op, transfer)?;
        let own = whole.own[part].to_vec();
        Ok(Self { own, ..whole })
    }

    fn all_reduce(mut self, op: ReduceOp, transfer: &mut Transfer<'_>) -> Result<Self, GroupFault> {
        let all = self.all(transfer);
        let ranks = if op == ReduceOp::Mean { all.len() } else { 1 };
        let sum = |index: usize| all.iter().map(|own| own[index]).sum::<f32>();
        self.own = (0..self.own.len())
            .map(|index| sum(index) / ranks as f32)
            .collect();
        Ok(self)
    }

    fn all_gather(
        mut self,
        offsets: &[usize],
        transfer: &mut Transfer<'_>,
    ) -> Result<Self, GroupFault> {
        self.own = self.all(transfer).concat();
        assert_eq!(self.own.len(), offsets[transfer.world_size()]);
        Ok(self)
    }

    fn broadcast(mut self, root: usize, transfer: &mut Transfer<'_>) -> Result<Self, GroupFault> {
        self.own = self.all(transfer).swap_remove(root);
        Ok(self)
    }
}

/// With the agreement, the counts and the faults of every buffer.
#[test]
fn a_buffer_of_another_memory_moves_its_elements_by_itself() {
    const RANKS: usize = 3;
    const ELEMENTS: usize = 10;
    let board = Arc::new(Board {
        by_rank: Mutex::new(vec![Vec::new(); RANKS]),
        ranks: Barrier::new(RANKS),
    });
    let split = || Split::Counts(vec![5, 0, 5]);
    let results = spawn(RANKS, |group| {
        let rank = group.rank();
        let on_board = |own| OnBoard {
            own,
            board: board.clone(),
        };
        let values = |elements: usize| -> Vec<f32> {
            let values = (0..elements).map(|index| (index * 7 + rank * 3) as f32 / 9.0);
            values.collect()
        };
        let part = values([5, 0, 5][rank]);
        let host = (
            group.all_reduce("mean", ReduceOp::Mean, values(ELEMENTS).into()),
            group.reduce_scatter("sum", ReduceOp::Sum, values(ELEMENTS).into(), split()),
            group.all_gather("parts", part.clone().into(), split()),
            group.broadcast("root", 1, values(ELEMENTS).into()),
        );
        let before = group.traffic().of(Operation::ReduceScatter);
        let (whole, part) = (on_board(values(ELEMENTS)), on_board(part));
        let moved = Pending::start(&group, move |ranks| {
            let OnBoard { own, board } = whole;
            let mean = Collective::AllReduce(ReduceOp::Mean);
            let sum = Collective::ReduceScatter(ReduceOp::Sum, split());
            let again = |own: &Vec<f32>| OnBoard {
                own: own.clone(),
                board: board.clone(),
            };
            Ok::<_, RanksError>((
                ranks.run("mean", mean, again(&own))?.own,
                ranks.run("sum", sum, again(&own))?.own,
                ranks
                    .run("parts", Collective::AllGather(split()), part)?
                    .own,
                ranks
                    .run("root", Collective::Broadcast { root: 1 }, again(&own))?
                    .own,
            ))
        });
        let moved = moved.wait().unwrap();
        assert_eq!(host.0.unwrap(), moved.0.into());
        assert_eq!(host.1.unwrap(), moved.1.into());
        assert_eq!(host.2.unwrap(), moved.2.into());
        assert_eq!(host.3.unwrap(), moved.3.into());
        let sent = group.traffic().of(Operation::ReduceScatter);
        assert_eq!(sent.calls, before.calls + 1);
        assert_eq!(
            sent.elements - before.elements,
            (ELEMENTS * (RANKS - 1)) as u64
        );

        // Ranks that differ are told before any of them waits at the board.
        let elements = on_board(values(ELEMENTS + usize::from(rank == 2)));
        let differs = Pending::start(&group, move |ranks| {
            let sum = Collective::AllReduce(ReduceOp::Sum);
            ranks.run("lengths", sum, elements).map(drop)
        });
        differs.wait()
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with("ranks differ: rank "), "{error}");
    }
}
