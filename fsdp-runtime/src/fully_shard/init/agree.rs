//! Checks that all ranks have the same model, and the agreement of ranks on an error.

use crate::error::{CollectiveError, Error, ShardError};
use crate::launch::Worker;
use crate::layout::Mesh;
use crate::options::FsdpOptions;
use crate::param_group::plan::Plan;

/// Checks that all ranks have built the same model, with the same options and the same version of this
/// crate.
pub(crate) fn agree(
    worker: &Worker,
    plan: &Plan,
    options: &FsdpOptions,
    mesh: Mesh,
) -> Result<(), Error> {
    let mut mine = vec![
        format!("{} {}", env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION")),
        format!("engine {}", worker.comm().world().engine()),
    ];
    mine.extend(plan.fingerprint(options, mesh));
    let all = worker.exchange("all_gather", "the model's layout", mine)?;
    let first = &all[0];
    // Reports the first line that differs, and every rank with the same line as the first such rank.
    let Some(other) = all.iter().find(|lines| *lines != first) else { return Ok(()) };
    let at = other.iter().zip(first.iter()).position(|(a, b)| a != b);
    let at = at.unwrap_or(other.len().min(first.len()));
    let line = |lines: &[String]| lines.get(at).cloned().unwrap_or_else(|| "nothing more".into());
    let found = line(other);
    let ranks = worker.world().ranks().zip(&all);
    let ranks = ranks.filter(|(_, lines)| line(lines) == found).map(|(rank, _)| rank).collect();
    Err(ShardError::ModelMismatch { ranks, expected: line(first), found }.into())
}

/// An error every rank finds by itself, so that none waits for the others.
pub(crate) fn same_on_all<T, E>(worker: &Worker, found: Result<T, E>) -> Result<T, Error>
where
    E: Into<Error> + ToString,
{
    let message = found.as_ref().err().map(ToString::to_string);
    let all = worker.exchange("all_gather", "errors of construction", message);
    match found {
        // Those who have heard of it may have ended the group by now.
        Err(error) => Err(error.into()),
        Ok(value) => match worker.world().ranks().zip(&all?).find(|(_, error)| error.is_some()) {
            None => Ok(value),
            Some((rank, reason)) => {
                let reason = reason.as_deref().unwrap_or_default().to_string();
                let failure = CollectiveError::PeerFailed { rank, reason };
                // Whatever this rank makes of it, that one is at fault.
                worker.comm().world().fail(failure.clone());
                Err(failure.into())
            }
        },
    }
}
