//! Automatic mixed precision for Burn.
