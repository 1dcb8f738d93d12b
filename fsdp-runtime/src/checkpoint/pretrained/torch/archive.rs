//! The zip archive that `torch.save` writes: records that are stored as they are.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::ops::Range;

use zip::{CompressionMethod, ZipArchive};

/// The records of an archive, by their names without the archive's folder.
#[derive(Debug)]
pub(super) struct Archive {
    /// Range of each record in the archive; `None` for a compressed or encrypted one.
    records: BTreeMap<String, Option<Range<usize>>>,
}

impl Archive {
    /// Name of the pickle of an archive.
    pub(super) const PICKLE: &'static str = "data.pkl";

    /// Reads the list of records.
    ///
    /// # Errors
    ///
    /// A description of the fault.
    pub(super) fn open(bytes: &[u8]) -> Result<Self, String> {
        let mut zip = ZipArchive::new(Cursor::new(bytes)).map_err(|error| error.to_string())?;
        let mut records = BTreeMap::new();
        for index in 0..zip.len() {
            let entry = zip.by_index_raw(index).map_err(|error| error.to_string())?;
            // Each record is in one folder, named after the file.
            let name = entry.name().map_err(|error| error.to_string())?;
            let Some((_, name)) = name.split_once('/') else { continue };
            let stored = entry.compression() == CompressionMethod::Stored && !entry.encrypted();
            let range = entry.data_start().and_then(|start| {
                let end = start.checked_add(entry.size())?;
                let range = usize::try_from(start).ok()?..usize::try_from(end).ok()?;
                bytes.get(range.clone()).map(|_| range)
            });
            let Some(range) = range else { return Err(format!("`{name}` exceeds the archive")) };
            if records.insert(name.to_string(), stored.then_some(range)).is_some() {
                return Err(format!("it has two records `{name}`"));
            }
        }
        Ok(Self { records })
    }

    /// Returns whether there is a record of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.records.contains_key(name)
    }

    /// Returns the range of a record's bytes in the archive.
    ///
    /// # Errors
    ///
    /// A description of the fault, where there is no such record, or it is not stored as it is.
    pub(super) fn record(&self, name: &str) -> Result<Range<usize>, String> {
        match self.records.get(name) {
            Some(Some(range)) => Ok(range.clone()),
            Some(None) => Err(format!("the record `{name}` is compressed or encrypted")),
            None => Err(format!("it has no record `{name}`")),
        }
    }
}
