//! Writes the references, with which the patched build is compared: what stock Burn 0.22.1 gives on
//! this machine.

#[path = "../../programs.rs"]
mod programs;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use programs::{Cnn, Mlp, On, Plain, Program, Transformer, checksums, train};

fn stock(on: On) -> (PathBuf, String) {
    let all = BTreeMap::from([
        (Mlp::NAME, checksums(&train::<Mlp>(on, &Plain))),
        (Cnn::NAME, checksums(&train::<Cnn>(on, &Plain))),
        (
            Transformer::NAME,
            checksums(&train::<Transformer>(on, &Plain)),
        ),
    ]);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent();
    let path = folder.expect("a folder above").join(on.reference());
    (path, serde_json::to_string(&all).expect("numbers") + "\n")
}

/// Writes the reference. Stock Burn gives the same twice, else a comparison would show nothing.
fn write(on: On) {
    let (path, found) = stock(on);
    assert_eq!(found, stock(on).1, "stock Burn gives other bits");
    std::fs::write(&path, &found).expect("the reference is written");
}

#[test]
fn flex() {
    write(On::Flex);
}

#[cfg(feature = "vulkan")]
#[test]
fn vulkan() {
    write(On::Vulkan);
}
