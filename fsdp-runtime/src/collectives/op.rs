//! The name of a collective, by which ranks check that they issue the same one.

use std::fmt;
use std::sync::Arc;

/// Name of one collective: its operation, and the unit or purpose it is for.
///
/// Every rank issues the same collectives in the same order. Ranks compare the names to find out
/// when they do not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Op {
    /// Operation, in PyTorch's words, such as `all_gather`.
    pub(crate) name: &'static str,
    /// Path of the unit, or another description of what the collective is for.
    pub(crate) unit: Arc<str>,
    /// Number of elements of the full tensor, which is equal on every rank; 0 for a collective
    /// without a tensor. Ranks compare it in launches with the option `debug`.
    pub(crate) size: usize,
}

impl Op {
    /// Names a collective without a size.
    pub(crate) fn new(name: &'static str, unit: impl Into<Arc<str>>) -> Self {
        Self { name, unit: unit.into(), size: 0 }
    }

    /// Sets the number of elements.
    pub(crate) fn of(self, size: usize) -> Self {
        Self { size, ..self }
    }

    /// Returns the span of the collective. `bytes` are those of the full tensor.
    pub(super) fn span(&self, bytes: usize) -> tracing::span::EnteredSpan {
        let bytes = bytes as u64;
        let (op, unit) = (self.name, &self.unit);
        tracing::trace_span!(target: "fsdp::trace", "fsdp::collective", %op, %unit, bytes).entered()
    }

    /// Returns whether two ranks have issued the same collective. `debug` compares sizes too.
    pub(super) fn matches(&self, other: &Self, debug: bool) -> bool {
        self.name == other.name && self.unit == other.unit && (!debug || self.size == other.size)
    }

    /// Describes a collective in an error about ranks that differ; with its size if `debug`.
    pub(super) fn describe(name: &str, unit: &str, size: u64, debug: bool) -> String {
        match debug {
            true => format!("{name} of {unit} ({size} elements)"),
            false => format!("{name} of {unit}"),
        }
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.name, self.unit)
    }
}
