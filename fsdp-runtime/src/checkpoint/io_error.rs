//! Conversion of system errors to [`CheckpointError`].

use std::path::Path;

use crate::error::CheckpointError;

/// Returns a function that converts an I/O error to [`CheckpointError::Io`] with the path and the
/// action that failed, a verb such as `read`.
pub(super) fn io_error(
    action: &'static str,
    path: &Path,
) -> impl Fn(std::io::Error) -> CheckpointError + use<> {
    let file = path.display().to_string();
    move |error| CheckpointError::Io {
        action,
        file: file.clone(),
        kind: error.kind(),
        reason: error.to_string(),
    }
}
