//! Puts the sources of this repository's packages into one file, the default text of the gpt
//! example: a program that was moved to another machine has it too.

use std::path::{Path, PathBuf};
use std::{env, fs, io};

fn main() -> io::Result<()> {
    let variable = |name| PathBuf::from(env::var_os(name).expect("cargo sets it"));
    let package = variable("CARGO_MANIFEST_DIR");
    let mut files = Vec::new();
    for sibling in fs::read_dir(package.join(".."))? {
        let sources = sibling?.path().join("src");
        if sources.is_dir() {
            collect(&sources, &mut files)?;
        }
    }
    files.sort();
    let mut text = String::new();
    for file in &files {
        println!("cargo::rerun-if-changed={}", file.display());
        text += &fs::read_to_string(file)?;
    }
    fs::write(variable("OUT_DIR").join("sources.txt"), text)
}

/// All Rust files below a directory.
fn collect(directory: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    Ok(())
}
