//! What ranks that are processes promise: see `launch`.

mod launch;
mod programs;
#[path = "../ranks/support.rs"]
mod support;
mod tests;

fn main() {
    launch::main(tests::ALL, programs::run);
}
