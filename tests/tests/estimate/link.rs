//! The link between host and device, as it is measured.

use std::time::Duration;

use burn_estimate::{LinkProfile, LinkedMemory, measure};
use burn_flex::Flex;
use tests::queue::{Answers, Queue, answer_reads};

/// Elements of a row and of a column of the tensor that moves.
const SIZE: usize = 256;

#[test]
fn a_link_is_measured_in_both_directions() {
    let _turn = super::turn();
    let delay = Duration::from_millis(20);
    answer_reads(Answers::LaterAndBlock(delay));
    let profile = measure::<Queue<Flex>>(&Default::default(), SIZE);
    answer_reads(Answers::AtOnce);
    let LinkProfile {
        upload_bytes_per_second,
        read_bytes_per_second,
        ..
    } = profile.link;
    let of_delay = (4 * SIZE * SIZE) as f64 / delay.as_secs_f64();
    assert!(read_bytes_per_second <= of_delay, "{:?}", profile.link);
    assert!(
        upload_bytes_per_second > 2.0 * of_delay,
        "{:?}",
        profile.link
    );
}

/// Offload is not free on a CPU, and a plan is told that it brings nothing.
#[test]
fn a_cpu_is_known_to_compute_in_the_memory_of_the_host() {
    let _turn = super::turn();
    let link = measure::<Flex>(&Default::default(), SIZE).link;
    assert_eq!(link.memory, LinkedMemory::Shared);
    for speed in [link.upload_bytes_per_second, link.read_bytes_per_second] {
        // Faster than any memory would be free.
        assert!((1e6..1e13).contains(&speed), "{link:?}");
    }
}
