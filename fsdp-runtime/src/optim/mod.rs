//! Optimizers that update a parameter in one pass over memory.
//!
//! [`AdamW`], [`Adam`] and [`Sgd`] are Burn [`Optimizer`](burn::optim::Optimizer)s. `init()` on a
//! config returns Burn's [`ModuleOptimizer`](burn::optim::ModuleOptimizer), so parameter groups,
//! learning-rate schedules, gradient clipping and records work as they do with Burn's optimizers. A
//! record can be loaded into the optimizer of the same name in [`burn::optim`], and the other way
//! round. The optimizers work on unsharded models too.
//!
//! # Speed
//!
//! For f32 tensors on Flex and on CubeCL devices, a step reads and writes the parameter and its
//! state once, and reads the gradient once. Flex uses vector registers and all threads of the
//! current rayon pool. A CubeCL device uses one kernel launch, which several parameters of a
//! sharded model share. The update is in place where no other tensor shares the memory, and then
//! allocates nothing. For other dtypes and backends, the same formula runs as tensor operations.
//!
//! [`Adadelta`], which Burn does not have, runs as tensor operations on every backend.
//!
//! # State
//!
//! Loaded state is stored in host memory until the parameter is stepped, and is then moved to the
//! parameter's device. Burn's optimizers load state on the default device.
//!
//! # Reproducibility
//!
//! On Flex, the result for an element depends only on the values of that element. It does not
//! depend on the element's position in the tensor, the number of threads, or the processor's vector
//! width. So sharding a parameter does not change a bit of its update.
//!
//! # Optimizers that need full matrices
//!
//! [`WholeParam`] steps a sharded model with an optimizer that needs full matrices, such as Muon.
//! Without it such an optimizer is an error in the first three steps, and so is one that clips by
//! norm itself.
//!
//! Imports point one way: on_host, clipping, owners, single_param, state_bytes <- check_optimizer,
//! fused, matrix_step <- fused_adam, sgd, whole_param <- adam, adamw; clipping, on_host <-
//! adadelta; unscale <- grad_scaler; ema.
#![cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::optimizers) is about this module.")]

mod adadelta;
mod adam;
mod adamw;
mod check_optimizer;
mod clipping;
mod ema;
mod fused;
mod fused_adam;
mod grad_scaler;
mod matrix_step;
mod on_host;
mod owners;
mod sgd;
mod single_param;
mod state_bytes;
#[cfg(all(test, feature = "cpu"))]
mod stream_order_tests;
#[cfg(all(test, feature = "cpu"))]
mod tests;
mod unscale;
mod whole_param;

pub use self::adadelta::{Adadelta, AdadeltaConfig, AdadeltaState};
pub use self::adam::{Adam, AdamConfig};
pub use self::adamw::{AdamW, AdamWConfig};
pub use self::ema::{Ema, EmaModel, SwappedIn};
pub use self::grad_scaler::{GradScaler, GradScalerConfig, Unscaled};
pub use self::on_host::OnHost;
pub(crate) use self::owners::owners;
pub use self::sgd::{Sgd, SgdConfig, SgdState};
pub use self::whole_param::WholeParam;
