//! What a simulated step takes: time by kind, and memory over time.

use serde::Serialize;

use super::collective::Operation;
use crate::param_group::memory::MemoryForecast;

/// Row of a [`Span`]: what runs at a time follows each other within a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Row {
    /// The rank's own computation.
    Compute,
    /// The rank's communication thread.
    Communication,
}

/// Kind of a [`Span`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SpanKind {
    /// A unit's forward.
    Forward,
    /// A forward that is repeated in backward.
    Recompute,
    /// A unit's backward.
    Backward,
    /// The update of the parameters.
    Optimizer,
    /// A wait for a collective.
    Wait,
    /// A collective.
    Collective(Operation),
    /// A copy between host and device.
    Copy,
}

impl SpanKind {
    /// Returns the name, such as `forward` or `all_gather`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Recompute => "recompute",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
            Self::Wait => "wait",
            Self::Collective(operation) => operation.name(),
            Self::Copy => "copy",
        }
    }
}

/// A stretch of time in a simulated step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Span {
    /// Row that it lies in.
    pub row: Row,
    /// What happens.
    pub kind: SpanKind,
    /// Index of the unit in layout order; `None` for the optimizer.
    pub unit: Option<usize>,
    /// Begin in seconds from the begin of the step.
    pub begin: f64,
    /// End in seconds from the begin of the step.
    pub end: f64,
    /// Bytes of the full tensor of a collective, or of a copy.
    pub bytes: usize,
}

/// Memory on the device at one moment of a simulated step, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Moment {
    /// Seconds from the begin of the step.
    pub time: f64,
    /// Gradients.
    pub gradients: usize,
    /// Activations.
    pub activations: usize,
}

/// The time and the memory of a simulated step on one rank.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Estimate {
    /// Seconds of a step.
    pub step: f64,
    /// Seconds of forward, backward and recomputation.
    pub compute: f64,
    /// Seconds of recomputation, a part of `compute`.
    pub recompute: f64,
    /// Seconds of the optimizer's update.
    pub optimizer: f64,
    /// Seconds in which the communication thread is busy.
    pub communication: f64,
    /// Seconds in which the computation waits for a collective or a copy.
    pub exposed: f64,
    /// Tokens of one rank in a second.
    pub tokens_per_second: f64,
    /// Model FLOP/s as a share of the device's peak, without what is recomputed. Attention counts
    /// with the whole square of the length, as is usual.
    pub utilization: f64,
    /// US dollars for a billion tokens, at the price of the device.
    pub dollars_per_billion_tokens: f64,
    /// Memory of the rank by kind, at the most, with activations.
    pub memory: MemoryForecast,
    /// Bytes of the device that training may use.
    pub usable: usize,
    /// What happens when, in order of the begins within each row.
    pub spans: Vec<Span>,
    /// Gradients and activations over time; other kinds do not change within a step.
    pub moments: Vec<Moment>,
}

impl Estimate {
    /// Returns whether the rank's memory suffices.
    pub fn fits(&self) -> bool {
        self.memory.total() <= self.usable
    }

    /// Returns the most bytes of gradients at any moment of the simulated step.
    pub fn peak_gradients(&self) -> usize {
        self.moments.iter().map(|moment| moment.gradients).max().unwrap_or(0)
    }

    /// Returns the most bytes of activations at any moment of the simulated step.
    pub fn peak_activations(&self) -> usize {
        self.moments.iter().map(|moment| moment.activations).max().unwrap_or(0)
    }
}
