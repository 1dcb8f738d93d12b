//! The schedule of a sharded model, for any backend.

use super::access::ScheduleState;
use super::collectives::ScheduleCollectives;
use super::common::ScheduleShards;
use super::control::ScheduleControl;
use super::core::Schedule;
use super::hold::ScheduleHolds;
use super::losses::ScheduleLosses;
use super::metrics::ScheduleMetrics;
use crate::backend::ModelBackend;
use crate::module::Runtime;

/// The schedule of a sharded model, for any backend.
pub(crate) trait ErasedSchedule:
    Runtime
    + ScheduleMetrics
    + ScheduleState
    + ScheduleLosses
    + ScheduleCollectives
    + ScheduleHolds
    + ScheduleControl
    + ScheduleShards
{
}

impl<B: ModelBackend> ErasedSchedule for Schedule<B> {}
