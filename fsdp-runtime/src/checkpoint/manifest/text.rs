//! The text of `manifest.json`.

use serde::Deserialize;

use super::checksum::{seal, unseal};
use super::document::{FORMAT, Manifest, VERSION};
use crate::error::CheckpointError;

impl Manifest {
    /// Parses a manifest and checks everything that can be checked without the other files. `file`
    /// is the name in errors.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::NotAManifest`], [`LaterVersion`](CheckpointError::LaterVersion),
    /// [`Damaged`](CheckpointError::Damaged) where the checksum does not match the text, or
    /// [`Inconsistent`](CheckpointError::Inconsistent) with every contradiction.
    pub fn parse(text: &[u8], file: &str) -> Result<Self, CheckpointError> {
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u64,
        }
        let not = |reason: String| CheckpointError::NotAManifest { file: file.into(), reason };
        let head: Head = serde_json::from_slice(text).map_err(|error| not(error.to_string()))?;
        if head.format != FORMAT {
            return Err(not(format!("its format is `{}`, not `{FORMAT}`", head.format)));
        }
        if head.version > VERSION {
            let (found, supported) = (head.version, VERSION);
            return Err(CheckpointError::LaterVersion { file: file.into(), found, supported });
        }
        let body = unseal(text)
            .map_err(|reason| CheckpointError::Damaged { file: file.into(), reason })?;
        Self::parse_body(&body, file)
    }

    /// Parses and checks a manifest like [`parse`](Self::parse), but neither needs nor verifies a
    /// checksum. A fuzzer calls it, since random text has no valid checksum.
    #[doc(hidden)]
    pub fn parse_body(body: &[u8], file: &str) -> Result<Self, CheckpointError> {
        let manifest: Self = serde_json::from_slice(body).map_err(|error| {
            CheckpointError::NotAManifest { file: file.into(), reason: error.to_string() }
        })?;
        manifest.check(file)?;
        Ok(manifest)
    }

    /// Returns the text of `manifest.json`, with the checksum.
    pub fn to_text(&self) -> String {
        seal(&self.to_body())
    }

    /// Returns the text without the checksum.
    #[doc(hidden)]
    pub fn to_body(&self) -> String {
        serde_json::to_string(self).expect("strings, numbers and maps with string keys serialise")
    }
}
