//! The schedule, which decides when each unit is gathered, resharded and reduced.
//!
//! *Forward*: `pre_forward` of a unit waits for the unit's all-gather and issues that of the unit
//! that came next in the last forward pass (forward prefetch). `post_forward` reshards the unit.
//! The outermost unit and the last unit stay gathered, because their backward is next.
//!
//! *Backward*: `pre_backward` of a unit waits for the unit's all-gather and issues that of the unit
//! that came before it in forward (`BACKWARD_PRE`). `post_backward` runs when the last gradient of
//! a call has arrived; it reshards the unit and issues the reduce-scatter. The first gradient of
//! the next unit waits for that reduce-scatter, so that the full gradients of only one unit exist
//! at a time.
//!
//! All of this runs on the rank's own thread. Only the collectives run on the communication thread,
//! in the order in which they were issued. The static layout and the order of forwards fix that
//! order, so all ranks issue the same sequence. A prefetch goes only into a gather buffer that is
//! not in use; a wrong prefetch costs one all-gather and has no other effect.
//!
//! *Recomputed units*: their forward records no graph. Their backward is a single operation, which
//! gathers the unit, recomputes the forward and runs its backward.
//!
//! Every step is traced with `tracing`, under the target `fsdp`, in the order of execution.
//!
//! Order of the files, from the bottom up: `counters`, `decide`, `settings`, `open_group`,
//! `unit_state`, `unit_call`, `reduction`, `buffers`, `peer_shards`, `step_loss`, `state`, `core`,
//! `saved`, `reshard`, `unshard`, `exchange_shards`, `common`, `hold`, `control`, `single_gather`, `whole_step`, `calls`,
//! `group`, `prefetch`, `reduce_codes`, `reduce`, `cast_replicated`, `backward`,
//! `recompute_first_run`, `recompute_backward`, `materialize`, `sum_of_part`, `tensor_parallel`, `context_parallel`, `forward`. The interfaces
//! follow: `autodiff_hooks`, `runtime`, `metrics`, `access`, `losses`, `collectives`, `erased`.

mod access;
mod autodiff_hooks;
mod backward;
mod buffers;
mod calls;
mod cast_replicated;
mod collectives;
mod common;
mod context_parallel;
mod control;
mod core;
mod counters;
pub(crate) mod decide;
mod erased;
mod exchange_shards;
mod forward;
mod group;
mod hold;
mod losses;
mod materialize;
mod metrics;
mod open_group;
mod peer_shards;
mod prefetch;
mod recompute_backward;
mod recompute_first_run;
mod reduce;
mod reduce_codes;
mod reduction;
mod reshard;
mod runtime;
mod saved;
mod settings;
mod single_gather;
mod state;
mod step_loss;
mod sum_of_part;
mod tensor_parallel;
mod unit_call;
mod unit_state;
mod unshard;
mod whole_step;

pub(crate) use self::common::{ScheduleShards, common_buffers};
pub(crate) use self::control::block_group;
pub(crate) use self::core::Schedule;
pub use self::counters::Counts;
pub(crate) use self::erased::ErasedSchedule;
pub(crate) use self::settings::Settings;
pub(crate) use self::whole_step::Whole;
