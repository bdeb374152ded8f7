//! The table has a row for every operation of the pinned Burn source, and no other.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use burn_amp::{Cast, op_table};

/// The methods of every operation trait of the burn-backend that this workspace builds with.
fn methods() -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::new();
    for path in sources(&burn_backend_source().join("src/backend/ops")) {
        let text = std::fs::read_to_string(&path).expect("a source file");
        let file = syn::parse_file(&text).expect("Rust");
        for item in file.items {
            if let syn::Item::Trait(item) = item {
                let names = item.items.iter().filter_map(|item| match item {
                    syn::TraitItem::Fn(method) => Some(method.sig.ident.to_string()),
                    _ => None,
                });
                found.insert(item.ident.to_string(), names.collect());
            }
        }
    }
    found
}

fn sources(folder: &std::path::Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// Where cargo keeps the source of the burn-backend in this workspace's lock file.
fn burn_backend_source() -> PathBuf {
    // Only this platform's dependencies: those of others may not be on this machine.
    let rustc = Command::new("rustc")
        .arg("-vV")
        .output()
        .expect("rustc runs");
    let version = String::from_utf8_lossy(&rustc.stdout).into_owned();
    let host = version
        .lines()
        .find_map(|line| line.strip_prefix("host: "))
        .expect("a host triple");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--locked"])
        .args(["--filter-platform", host])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let manifest = metadata["packages"]
        .as_array()
        .expect("packages")
        .iter()
        .find(|package| package["name"] == "burn-backend" && package["version"] == "0.21.0")
        .and_then(|package| package["manifest_path"].as_str())
        .expect("burn-backend 0.21.0 is a dependency");
    PathBuf::from(manifest)
        .parent()
        .expect("a folder")
        .to_owned()
}

#[test]
fn every_operation_has_exactly_one_row() {
    let methods = methods();
    let mut groups: Vec<&str> = op_table().iter().map(|row| row.group).collect();
    groups.sort_unstable();
    groups.dedup();
    assert_eq!(groups.len(), 7, "{groups:?}");
    for group in groups {
        let mut expected = methods
            .get(group)
            .unwrap_or_else(|| panic!("no trait {group} in burn-backend"))
            .clone();
        let mut rows: Vec<_> = op_table()
            .iter()
            .filter(|row| row.group == group)
            .map(|row| row.op.to_owned())
            .collect();
        expected.sort();
        rows.sort();
        assert_eq!(rows, expected, "rows of {group}");
    }
}

/// The traits that `Backend` requires are those of the table, so no group of operations can be
/// missing.
#[test]
fn every_operation_trait_is_covered() {
    let text = std::fs::read_to_string(burn_backend_source().join("src/backend/base.rs"))
        .expect("a source file");
    let file = syn::parse_file(&text).expect("Rust");
    let backend = file.items.iter().find_map(|item| match item {
        syn::Item::Trait(item) if item.ident == "Backend" => Some(item),
        _ => None,
    });
    let required: Vec<_> = backend
        .expect("trait Backend")
        .supertraits
        .iter()
        .filter_map(|bound| match bound {
            syn::TypeParamBound::Trait(bound) => bound.path.segments.last(),
            _ => None,
        })
        .map(|segment| segment.ident.to_string())
        .filter(|name| name.ends_with("Ops"))
        .collect();
    assert_eq!(required.len(), 7);
    for name in required {
        assert!(op_table().iter().any(|row| row.group == name), "{name}");
    }
}

#[test]
fn the_classes_are_pytorchs() {
    let class = |name: &str| {
        op_table()
            .iter()
            .find(|row| row.op == name || row.short_name() == name)
            .unwrap_or_else(|| panic!("no row {name}"))
            .cast
    };
    let lower = "matmul linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu attention";
    let full = "avg_pool2d adaptive_avg_pool1d deform_conv2d acos asin cosh sinh tan exp log log1p recip powf powf_scalar powi powi_scalar softmax log_softmax softmin \
                layer_norm sum sum_dim prod prod_dim mean mean_dim cumsum cumprod ctc_loss interpolate rfft irfft \
                log_sigmoid";
    let promote = "add sub mul div remainder cross atan2 cat mask_where scatter_add select_add grid_sample_2d equal greater \
                   lower_equal";
    let keep = "relu gelu sigmoid tanh neg reshape transpose slice gather embedding max_pool2d max argmax sqrt abs cast";
    for (names, expected) in [
        (lower, Cast::Lower),
        (full, Cast::Full),
        (promote, Cast::Promote),
        (keep, Cast::Keep),
    ] {
        for name in names.split_whitespace() {
            assert_eq!(class(name), expected, "{name}");
        }
    }
}

#[test]
fn docs_are_printed_from_the_table() {
    let printed = tests::docs::operations();
    let found = tests::docs::printed_operations(&printed);
    assert!(
        found == printed,
        "docs/operations.md is not what the table prints; run UPDATE_DOCS=1 cargo test --workspace --test laws table"
    );
}

#[test]
fn docs_name_every_operation_once_by_its_work() {
    let printed = tests::docs::operations();
    let (_, part) = printed.split_once("\n# Work").expect("the part");
    for op in burn_checkpoint::op_table() {
        let name = format!("`{}`", op.name);
        let lines: Vec<_> = part.lines().filter(|line| line.contains(&name)).collect();
        let [line] = lines.as_slice() else {
            panic!("{name}: {lines:?}");
        };
        assert!(line.contains(op.group), "{name}: {line}");
    }
}
