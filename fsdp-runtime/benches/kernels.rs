//! Runs the bench in `programs/kernels.rs`.

#[path = "common/allocator.rs"]
mod allocator;
#[path = "programs/kernels.rs"]
mod kernels;

fn main() {
    allocator::choose(false);
    kernels::main();
}
