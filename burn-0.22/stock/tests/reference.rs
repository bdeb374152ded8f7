//! `reference.json`, with which the patched build is compared, is what stock Burn 0.22.1 gives. `UPDATE=1` writes it.

#[path = "../../programs.rs"]
mod programs;

use std::collections::BTreeMap;

use programs::{Cnn, Mlp, Plain, Program, Transformer, train};

#[test]
fn the_reference_is_what_stock_burn_gives() {
    let all = BTreeMap::from([
        (Mlp::NAME, train::<Mlp>(&Plain)),
        (Cnn::NAME, train::<Cnn>(&Plain)),
        (Transformer::NAME, train::<Transformer>(&Plain)),
    ]);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../reference.json");
    let found = serde_json::to_string(&all).expect("numbers") + "\n";
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(path, &found).expect("reference.json is written");
    }
    let expected = std::fs::read_to_string(path).expect("reference.json");
    assert!(
        found == expected,
        "stock Burn gives other bits than reference.json"
    );
}
