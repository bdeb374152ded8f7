//! The Rust code of README and of the pages compiles: each of their blocks stands in `code.rs`,
//! word for word, but what needs MPI, and those that are doctests of their crate. The page of
//! thread-locals lists all.

#[rustfmt::skip] // set as on the pages
mod code;

use std::fs;
use std::path::{Path, PathBuf};

/// Code without comments and white space.
fn bare(code: &str) -> String {
    let lines = code.lines().map(|line| match line.find("//") {
        Some(comment) => &line[..comment],
        None => line,
    });
    lines.flat_map(str::split_whitespace).collect()
}

/// The blocks of Rust of a page.
fn blocks(page: &str) -> Vec<String> {
    let blocks = page.split("```rust\n").skip(1);
    let blocks = blocks.map(|rest| rest.split("```").next().unwrap_or_default().to_owned());
    blocks.collect()
}

#[test]
fn each_block_of_the_pages_is_compiled() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let code = bare(include_str!("code.rs"));
    let (mut found, mut missing) = (0, Vec::new());
    let folders = fs::read_dir(&root).expect("the workspace").flatten();
    let folders = folders.map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // The blocks of burn-ranks are its doctests.
        let has_pages = name == "docs" || name.starts_with("burn-");
        path.is_dir() && has_pages && name != "burn-0.22" && name != "burn-ranks"
    });
    for folder in folders.chain([root.clone()]) {
        let files = fs::read_dir(folder).expect("a folder").flatten();
        for page in files.map(|file| file.path()) {
            if page.extension().is_some_and(|extension| extension == "md") {
                for block in blocks(&fs::read_to_string(&page).expect("text")) {
                    found += 1;
                    if !block.contains("MpiGroup") && !code.contains(&bare(&block)) {
                        missing.push(format!("{}:\n{block}", page.display()));
                    }
                }
            }
        }
    }
    assert!(found > 20, "{found} blocks");
    assert!(
        missing.is_empty(),
        "not in code.rs:\n{}",
        missing.join("\n")
    );
}

/// The Rust files below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let found = entries.map(|entry| entry.path());
    found
        .flat_map(|path| {
            if path.is_dir() {
                sources(&path)
            } else {
                vec![path]
            }
        })
        .collect()
}

#[test]
fn each_thread_local_is_on_its_page() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(root.join("docs/seams.md")).expect("the page");
    // A row of several files of one folder names the folder once.
    let rows = page.lines().filter(|line| line.starts_with("| `burn-"));
    let mut listed = Vec::new();
    for row in rows.filter_map(|row| row.split('|').nth(1)) {
        let mut folder = Path::new("").to_owned();
        for file in row.split(',').map(|file| file.trim().trim_matches('`')) {
            let file = if file.contains('/') {
                PathBuf::from(file)
            } else {
                folder.join(file)
            };
            folder = file.parent().expect("a file").to_owned();
            listed.push(file);
        }
    }
    let crates = fs::read_dir(&root).expect("the workspace").flatten();
    let crates = crates.filter(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with("burn-") && name != "burn-0.22"
    });
    let mut found: Vec<_> = crates
        .flat_map(|entry| sources(&entry.path().join("src")))
        .filter(|path| fs::read_to_string(path).is_ok_and(|code| code.contains("thread_local! {")))
        .map(|path| path.strip_prefix(&root).expect("below it").to_owned())
        .collect();
    found.sort();
    listed.sort();
    assert_eq!(
        listed, found,
        "docs/seams.md does not list the thread-locals that there are"
    );
}
