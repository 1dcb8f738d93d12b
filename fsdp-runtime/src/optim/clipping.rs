//! Gradient clipping of the optimizers' configs.

use burn::grad_clipping::GradientClippingConfig;
use burn::optim::ModuleOptimizer;

/// Returns the optimizer with the configured gradient clipping, if there is any.
pub(super) fn with_clipping(
    optimizer: ModuleOptimizer,
    clipping: Option<&GradientClippingConfig>,
) -> ModuleOptimizer {
    match clipping {
        Some(clipping) => optimizer.with_grad_clipping(clipping.init()),
        None => optimizer,
    }
}
