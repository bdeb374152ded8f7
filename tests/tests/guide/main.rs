//! The Rust code of README and of the pages compiles: each of their blocks stands in `code.rs`,
//! word for word, but what needs MPI, and those that are doctests of their crate.

#[rustfmt::skip] // set as on the pages
mod code;

use std::fs;
use std::path::Path;

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
