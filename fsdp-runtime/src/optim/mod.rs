//! Optimizers that update a parameter in one pass over memory.
//!
//! [`AdamW`], [`Adam`] and [`Sgd`] are Burn [`Optimizer`](burn::optim::Optimizer)s: their configs'
//! `init()` gives Burn's [`ModuleOptimizer`](burn::optim::ModuleOptimizer), and parameter groups,
//! learning-rate schedules, gradient clipping and records work as with Burn's own. Records are
//! interchangeable with those of the optimizer of the same name in [`burn::optim`]. They need no
//! sharding; an unsharded model gains as much.
//!
//! In f32 on Flex and on CubeCL devices a step reads the parameter, its gradient and its state once and
//! writes them once: in vector registers and on all threads of the current rayon pool, or in one launch
//! of the device, which takes several parameters of a sharded model. It writes in place wherever no other
//! tensor shares the memory, and then allocates nothing. Elsewhere, and for other number types, the same
//! formula runs as tensor operations.
//!
//! State that is loaded comes into the host's memory, and goes to the parameter's device when that is
//! stepped next; Burn's own optimizers load it on the default device.
//!
//! [`WholeParam`] steps a sharded model with an optimizer that needs whole matrices.
//!
//! On Flex an element's result depends on its own numbers alone, not on where it lies in its tensor,
//! on the number of threads or on the processor's vector width: sharding a parameter changes no bit of
//! its update.

mod adam;
mod fused;
mod grad_scaler;
mod on_host;
mod sgd;
#[cfg(all(test, feature = "cpu"))]
mod tests;
mod unscale;
mod whole;

pub use self::grad_scaler::{GradScaler, GradScalerConfig, Unscaled};
pub use adam::{Adam, AdamConfig, AdamW, AdamWConfig};
pub use on_host::OnHost;
pub use sgd::{Sgd, SgdConfig, SgdState};
pub use whole::WholeParam;
pub(crate) use whole::owners;
