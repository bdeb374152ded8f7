//! Tokens, sequences, and their order.

use examples::finetune::options::Packing;
use examples::finetune::order::Order;
use examples::finetune::text::{Sequence, Text, pack};

use crate::{Directory, golden};

#[test]
fn tokens_are_those_of_the_python_package() {
    let golden: Vec<Vec<u32>> = serde_json::from_value(golden()["tokens"].clone()).expect("tokens");
    let text = Text::load(&Directory::new("llama").options(""), 40).expect("a text");
    assert_eq!((text.train.len(), text.valid.len()), (12, 1));
    let read = text.train.iter().chain(&text.valid);
    let read: Vec<u32> = read.flat_map(|sequence| sequence.tokens.clone()).collect();
    assert_eq!(read, golden.concat()[..13 * 16]);
}

#[test]
fn boundaries_are_where_documents_begin() {
    // Tokens 0 to 3, none, 4 to 5, 6 to 13; the last two fill no sequence.
    let documents = [vec![1; 4], vec![], vec![2; 2], vec![3; 8]].map(|tokens| Sequence {
        tokens,
        boundaries: Vec::new(),
        counted: None,
    });
    let boundaries = |packing| -> Vec<Vec<usize>> {
        let packed = pack(&documents, 4, packing);
        packed
            .into_iter()
            .map(|sequence| sequence.boundaries)
            .collect()
    };
    // The second document begins with a sequence, the third within it.
    assert_eq!(boundaries(Packing::Documents), [vec![], vec![2], vec![]]);
    assert!(boundaries(Packing::Plain).concat().is_empty());
    let packed = pack(&documents, 4, Packing::Plain);
    assert_eq!(packed[1].tokens, [2, 2, 3, 3]);
}

#[test]
fn an_epoch_reads_every_sequence_once_in_its_own_order() {
    let epochs = |seed| -> Vec<Vec<usize>> {
        let mut order = Order::new(vec![16; 12], 5, seed);
        let update = |update| order.update(update);
        // Updates of five sequences do not end with an epoch.
        let all: Vec<usize> = (0..24).flat_map(update).collect();
        all.chunks_exact(12).map(<[_]>::to_vec).collect()
    };
    let shuffled = epochs(Some(7));
    assert_eq!(shuffled, epochs(Some(7)));
    assert_ne!(shuffled, epochs(Some(8)));
    assert_ne!(shuffled[0], shuffled[1]);
    for epoch in &shuffled {
        let mut sorted = epoch.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..12).collect::<Vec<_>>());
    }
    assert!(epochs(None).iter().all(|epoch| epoch.is_sorted()));

    // The order after a pause is that without it.
    let mut resumed = Order::new(vec![16; 12], 5, Some(7));
    assert_eq!(resumed.update(7), shuffled.concat()[35..40]);
}

#[test]
fn updates_have_similar_lengths_where_an_epoch_ends_within_one_too() {
    // An epoch is five updates and a half.
    let lengths: Vec<usize> = (0..22).map(|number| 1 + number * 7 % 22).collect();
    let mut order = Order::new(lengths.clone(), 4, Some(7));
    let updates: Vec<_> = (0..11).map(|update| order.update(update)).collect();
    for epoch in [updates[..5].concat(), updates[6..].concat()] {
        let mut spans: Vec<_> = epoch
            .chunks(4)
            .map(|update| (lengths[update[3]], lengths[update[0]]))
            .collect();
        spans.sort_unstable();
        // No update has a length between those of another.
        let is_apart = |pair: &[(usize, usize)]| pair[0].1 < pair[1].0;
        assert!(spans.windows(2).all(is_apart), "{spans:?}");
    }
    let mut read = updates.concat();
    read.sort_unstable();
    let twice: Vec<_> = (0..22).flat_map(|sequence| [sequence; 2]).collect();
    assert_eq!(read, twice);

    // An update of several epochs.
    let mut order = Order::new(lengths, 50, Some(7));
    let both = [0, 1].map(|update| order.update(update)).concat();
    for sequence in 0..22 {
        let times = both.iter().filter(|read| **read == sequence);
        assert!((4..=5).contains(&times.count()));
    }
}
