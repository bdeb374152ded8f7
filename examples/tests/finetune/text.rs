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
