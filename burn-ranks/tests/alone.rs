//! None of Burn's crates, and no other crate of this workspace, is in the dependencies.

use std::collections::{BTreeMap, BTreeSet};

/// The versions that cargo has chosen for this workspace, with all features of all packages.
const LOCK: &str = include_str!("../../Cargo.lock");

/// The dependencies of each package by name, those of tests included. Versions of a package are
/// taken together.
fn dependencies() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    let mut all: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for package in LOCK.split("[[package]]").skip(1) {
        let name = package
            .lines()
            .find_map(|line| line.strip_prefix("name = "));
        let name = name.expect("a package has a name").trim_matches('"');
        // ` "name",`, or ` "name version",` where there are several.
        let listed = package.lines().filter_map(|line| line.strip_prefix(" \""));
        let listed = listed.filter_map(|line| line.split([' ', '"']).next());
        all.entry(name).or_default().extend(listed);
    }
    all
}

/// All packages that `package` is built and tested with.
fn built_with(package: &str) -> BTreeSet<&'static str> {
    let dependencies = dependencies();
    let mut found = BTreeSet::new();
    let mut open: Vec<_> = dependencies[package].iter().copied().collect();
    while let Some(next) = open.pop() {
        if found.insert(next) {
            open.extend(&dependencies[next]);
        }
    }
    found
}

#[test]
fn no_crate_of_burn_is_in_the_dependencies() {
    let ranks = built_with("burn-ranks");
    let of_burn = |name: &&&str| name.starts_with("burn") || name.starts_with("cubecl");
    assert_eq!(ranks.iter().find(of_burn), None, "{ranks:?}");
    // The search finds what there is, also of an optional feature, and indirectly.
    assert!(ranks.contains("half") && ranks.contains("mpi") && ranks.contains("mpi-sys"));
    let zero = built_with("burn-zero");
    assert!(zero.contains("burn-ranks") && zero.contains("burn-backend"));
}
