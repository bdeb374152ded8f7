//! Random programs of several ranks in which one fails at a random place.

use std::{
    thread,
    time::{Duration, Instant},
};

use burn_ranks::Pending;
use burn_ranks::{
    GroupFault, GroupOptions, ProcessGroup, RanksError, ReduceOp, Split, ThreadGroup,
};
use proptest::prelude::*;

use crate::support::start_all_reduce;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Failure {
    Panics,
    Leaves,
    Hangs,
    Skips,
    GivesUp,
}

/// Where a rank hangs; elsewhere nothing may depend on it.
const DEADLINE: Duration = Duration::from_millis(600);
const BOUND: Duration = Duration::from_secs(20);

/// One rank's program: `calls` collectives, some of them under way at the same time.
fn program(
    group: &ThreadGroup,
    calls: usize,
    fails: Option<(usize, Failure)>,
) -> Result<(), RanksError> {
    let mut under_way = Vec::new();
    for call in 0..calls {
        match fails {
            Some((at, Failure::Panics)) if at == call => panic!("at {call}"),
            Some((at, Failure::Leaves)) if at == call => break,
            Some((at, Failure::Hangs)) if at == call => thread::sleep(3 * DEADLINE),
            Some((at, Failure::Skips)) if at == call => continue,
            Some((at, Failure::GivesUp)) if at == call => group.abort("enough"),
            _ => {}
        }
        let label = format!("call {call}");
        let values = vec![1.0; 4 * group.world_size()].into();
        match call % 3 {
            0 => under_way.push(start_all_reduce(group, &label, ReduceOp::Sum, values)),
            1 => under_way.push(Pending::start(group, move |ranks| {
                ranks.reduce_scatter(&label, ReduceOp::Mean, values, Split::Equal)
            })),
            _ => group.barrier(&label)?,
        }
    }
    under_way
        .into_iter()
        .try_for_each(|pending| pending.wait().map(drop))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn all_ranks_end_and_name_the_one_that_failed(
        world_size in 2..5_usize, calls in 1..9_usize, at in 0..9_usize, culprit in 0..5_usize,
        failure in prop::sample::select(vec![
            Failure::Panics, Failure::Leaves, Failure::Hangs, Failure::Skips, Failure::GivesUp,
        ]),
    ) {
        let (at, culprit) = (at % calls, culprit % world_size);
        let start = Instant::now();
        let options = match failure {
            Failure::Hangs => GroupOptions::with_deadline(DEADLINE),
            _ => GroupOptions::default(),
        };
        let results = ThreadGroup::spawn(world_size, options, |group| {
            program(&group, calls, (group.rank() == culprit).then_some((at, failure)))
        });
        prop_assert!(start.elapsed() < BOUND);
        let results = match (failure, results) {
            (Failure::Panics, Err(RanksError::Group(GroupFault::PeerPanicked { rank, message }))) => {
                prop_assert_eq!((rank, message), (culprit, format!("at {at}")));
                return Ok(());
            }
            (_, results) => results.unwrap(),
        };
        for (rank, result) in results.into_iter().enumerate() {
            if rank == culprit {
                continue; // it may have left in peace
            }
            let Err(RanksError::Group(fault)) = result else { panic!("rank {rank} saw nothing: {result:?}") };
            let named = match (&failure, &fault) {
                (Failure::Leaves | Failure::Skips, GroupFault::PeerLeft { peer, .. }) => *peer == culprit,
                (Failure::Skips, GroupFault::Mismatch { rank, peer, .. }) => (*rank == culprit) != (*peer == culprit),
                (Failure::Hangs, GroupFault::Deadline { missing, .. }) => missing == &[culprit],
                (Failure::GivesUp, GroupFault::Aborted { rank, .. }) => *rank == culprit,
                _ => false,
            };
            prop_assert!(named, "{:?} of rank {} is told to rank {} as: {}", failure, culprit, rank, fault);
        }
    }
}
