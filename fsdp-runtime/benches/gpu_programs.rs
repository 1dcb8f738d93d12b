//! The benches `attention`, `kernels` and `step` in one program, of which `gpu/pack` makes an archive: each of them
//! alone would contain LLVM and Burn.
//!
//! The name by which the program is started selects the bench: `attention`, `kernel_rates` or `step`.

use std::path::Path;

#[path = "common/allocator.rs"]
mod allocator;
#[path = "programs/attention.rs"]
mod attention;
#[path = "programs/kernels.rs"]
mod kernels;
#[path = "programs/step.rs"]
mod step;

fn main() {
    let program = std::env::args().next().unwrap_or_default();
    match Path::new(&program).file_name().and_then(|name| name.to_str()) {
        Some("attention") => {
            allocator::choose(false);
            attention::main();
        }
        Some("kernel_rates") => {
            allocator::choose(false);
            kernels::main();
        }
        Some("step") => step::main(),
        _ => {
            eprintln!("start this program by the name attention, kernel_rates or step");
            std::process::exit(2);
        }
    }
}
