//! Runs the bench in `programs/attention.rs`.

#[path = "common/allocator.rs"]
mod allocator;
#[path = "programs/attention.rs"]
mod attention;

fn main() {
    allocator::choose(false);
    attention::main();
}
