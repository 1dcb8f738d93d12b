//! Plans of training: memory, collectives and time of a step, before a device is rented.
//!
//! [`Plan`] takes the decisions of the schedule that trains, without tensors and without peers. A
//! [`Cluster`] says how fast devices and links are, and [`Plan::estimate`] simulates a step on it.
//!
//! Imports point one way: cluster <- transformer <- folder; cluster <- collective <- estimate, work <-
//! step <- simulate <- search, page.

mod cluster;
mod collective;
mod estimate;
mod folder;
#[cfg(feature = "plot")]
mod page;
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
pub use self::step::Plan;
pub use self::transformer::Transformer;
pub use self::work::{Batch, Recomputation, UnitWork};
pub use crate::param_group::plan::shape::{ModelShape, ParamShape, UnitShape};
