//! Runs the bench in `programs/step.rs`.

#[path = "common/allocator.rs"]
mod allocator;
#[path = "programs/step.rs"]
mod step;

fn main() {
    step::main();
}
