//! See `cost.rs` above.

#[path = "../../cost.rs"]
mod cost;

fn main() {
    cost::run();
}
