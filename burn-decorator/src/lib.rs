//! One table of every backend operation of Burn 0.21.
