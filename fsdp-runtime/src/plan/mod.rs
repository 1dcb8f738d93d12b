//! Plans of training: memory, collectives and time of a step, before a device is rented.
//!
//! [`StepPlan`] takes the decisions of the schedule that trains, without tensors and without peers. A
//! [`Cluster`] says how fast devices and links are, and [`StepPlan::estimate`] simulates a step on it.
//!
//! [`MemoryForecast`](crate::memory::MemoryForecast) is the memory that a rank will need for a model.
//!
//! Imports point one way: forecast; cluster <- transformer <- folder; rehearsal, cluster <- collective <-
//! estimate, work <- step <- simulate <- search, page.
#![cfg_attr(doc, doc = "\n[A page of the guide](crate::guide::plan) is about this module.")]

mod cluster;
mod collective;
mod estimate;
mod folder;
mod forecast;
#[cfg(feature = "plot")]
mod page;
mod rehearsal;
mod search;
mod simulate;
mod step;
mod transformer;
mod work;

pub use self::cluster::{Accelerator, Cluster, Link, UnknownPreset};
pub use self::collective::{Collective, Operation, Traffic};
pub use self::estimate::{Estimate, Moment, Row, Span, SpanKind};
pub use self::folder::FolderError;
#[cfg(feature = "plot")]
pub use self::page::{Shown, html};
pub use self::search::{Candidate, Cheaper, Found, Question, search};
pub use self::step::StepPlan;
pub use self::transformer::Transformer;
pub use self::work::{Batch, ParallelWork, Recomputation, UnitWork};
pub use crate::param_group::plan::shape::{ModelShape, ParamShape, UnitShape};
