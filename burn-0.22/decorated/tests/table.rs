//! The table has a row for every operation of Burn 0.22.1's source, and no other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use burn_decorated::op_table;

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => files.extend(sources(&path)),
            false => files.push(path),
        }
    }
    files.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    files
}

/// The source of the burn-backend in this workspace's lock file.
fn burn_backend() -> PathBuf {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--locked"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("packages");
    let package = packages
        .iter()
        .find(|package| package["name"] == "burn-backend");
    let package = package.expect("burn-backend is a dependency");
    assert_eq!(package["version"], "0.22.1");
    let manifest = PathBuf::from(package["manifest_path"].as_str().expect("a path"));
    manifest.parent().expect("a folder").join("src/backend")
}

fn traits(files: &[PathBuf]) -> Vec<syn::ItemTrait> {
    let items = files.iter().flat_map(|path| {
        let text = std::fs::read_to_string(path).expect("a source file");
        syn::parse_file(&text).expect("Rust").items
    });
    let traits = items.filter_map(|item| match item {
        syn::Item::Trait(item) => Some(item),
        _ => None,
    });
    traits.collect()
}

#[test]
fn every_operation_has_exactly_one_row() {
    let mut expected: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for item in traits(&sources(&burn_backend().join("ops"))) {
        let methods = item.items.iter().filter_map(|item| match item {
            syn::TraitItem::Fn(method) => Some(method.sig.ident.to_string()),
            _ => None,
        });
        expected.insert(item.ident.to_string(), methods.collect());
    }
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for row in op_table() {
        found
            .entry(row.group.to_owned())
            .or_default()
            .push(row.op.to_owned());
    }
    assert_eq!(found.len(), 7);
    assert_eq!(op_table().len(), 429);
    for (group, rows) in &mut found {
        let methods = expected.get_mut(group).expect("a trait of burn-backend");
        methods.sort();
        rows.sort();
        assert_eq!(rows, methods, "rows of {group}");
    }
}

/// `DistributedOps`, which 0.22 asks of every backend, is of no tensor operations: each decorator
/// implements it by hand.
#[test]
fn every_operation_trait_is_covered() {
    let backend = traits(&[burn_backend().join("base.rs")]);
    let backend = backend.iter().find(|item| item.ident == "Backend");
    let bounds = &backend.expect("trait Backend").supertraits;
    let mut required: Vec<_> = bounds
        .iter()
        .filter_map(|bound| match bound {
            syn::TypeParamBound::Trait(bound) => bound.path.segments.last(),
            _ => None,
        })
        .map(|segment| segment.ident.to_string())
        .filter(|name| name.ends_with("Ops"))
        .collect();
    required.retain(|name| !op_table().iter().any(|row| row.group == name));
    assert_eq!(required, ["DistributedOps"]);
}
