//! Burn 0.22.1 without a patch.
