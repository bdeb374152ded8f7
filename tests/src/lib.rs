//! Laws across crates.
