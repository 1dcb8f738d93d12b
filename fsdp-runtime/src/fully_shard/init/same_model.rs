//! The check that all ranks have the same model.

use crate::error::{Error, ShardError};
use crate::launch::Worker;
use crate::layout::Mesh;
use crate::options::FsdpOptions;
use crate::param_group::plan::ModelPlan;

/// Checks that all ranks have built the same model, with the same options and the same version of
/// this crate.
pub(in crate::fully_shard) fn check_same_model(
    worker: &Worker,
    plan: &ModelPlan,
    options: &FsdpOptions,
    mesh: Mesh,
) -> Result<(), Error> {
    let mut mine = vec![
        format!("{} {}", env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION")),
        format!("engine {}", worker.comm().world().engine()),
    ];
    mine.extend(plan.fingerprint(options, mesh));
    let all = worker.exchange_as("all_gather", "the model's layout", mine)?;
    let first = &all[0];
    // Reports the first line that differs, and every rank with the same line as the first such
    // rank.
    let Some(other) = all.iter().find(|lines| *lines != first) else { return Ok(()) };
    let at = other.iter().zip(first.iter()).position(|(a, b)| a != b);
    let at = at.unwrap_or(other.len().min(first.len()));
    let line = |lines: &[String]| lines.get(at).cloned().unwrap_or_else(|| "nothing more".into());
    let found = line(other);
    let ranks = worker.world().ranks().zip(&all);
    let ranks = ranks.filter(|(_, lines)| line(lines) == found).map(|(rank, _)| rank).collect();
    Err(ShardError::ModelMismatch { ranks, expected: line(first), found }.into())
}
