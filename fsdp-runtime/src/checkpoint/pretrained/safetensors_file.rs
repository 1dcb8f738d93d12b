//! Writing safetensors files as a stream: the header first, since all shapes are known, then one
//! tensor after another.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use burn_pack::AtomicFile;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::options::SaveDtype;
use crate::error::SaveError;

/// Number of elements converted at a time.
const CHUNK: usize = 1 << 14;

/// Header of a tensor that is to be written.
#[derive(Clone, Debug)]
pub(in crate::checkpoint) struct TensorHeader {
    pub(in crate::checkpoint) name: String,
    pub(in crate::checkpoint) shape: Vec<usize>,
    pub(in crate::checkpoint) dtype: Dtype,
    /// Size of the tensor in bytes.
    pub(in crate::checkpoint) bytes: u64,
}

impl SaveDtype {
    /// Returns the equivalent dtype of the safetensors crate.
    pub(in crate::checkpoint) fn safetensors(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
        }
    }
}

/// A file that is being written under a temporary name. A drop before [`complete`](Self::complete)
/// deletes it.
pub(in crate::checkpoint) struct NewFile {
    /// Path of the file, for error messages.
    label: String,
    scratch: AtomicFile,
    out: BufWriter<File>,
}

/// A file that is complete on disk, still under the temporary name.
pub(in crate::checkpoint) struct CompleteFile {
    label: String,
    scratch: AtomicFile,
}

impl NewFile {
    /// Creates a file to be published at `path`.
    pub(in crate::checkpoint) fn create(path: &Path) -> Result<Self, SaveError> {
        let label = path.display().to_string();
        match AtomicFile::create(path) {
            Ok((scratch, file)) => {
                Ok(Self { label, scratch, out: BufWriter::with_capacity(1 << 18, file) })
            }
            Err(error) => Err(SaveError::Io { file: label, reason: error.to_string() }),
        }
    }

    /// Creates a safetensors file with the header of `tensors`, to be published at `path`.
    pub(in crate::checkpoint) fn safetensors(
        path: &Path,
        tensors: &[TensorHeader],
    ) -> Result<Self, SaveError> {
        let mut header = Map::new();
        // transformers writes this field, and requires it in a file that it loads.
        header.insert("__metadata__".into(), json!({ "format": "pt" }));
        let mut offset = 0;
        for tensor in tensors {
            let end = offset + tensor.bytes;
            let info = json!({
                "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [offset, end],
            });
            header.insert(tensor.name.clone(), info);
            offset = end;
        }
        let mut text = Value::Object(header).to_string();
        // Tensor data must be aligned to 8 bytes.
        text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
        let mut file = Self::create(path)?;
        file.write(&(text.len() as u64).to_le_bytes())?;
        file.write(text.as_bytes())?;
        Ok(file)
    }

    /// Appends bytes.
    pub(in crate::checkpoint) fn write(&mut self, bytes: &[u8]) -> Result<(), SaveError> {
        self.out.write_all(bytes).map_err(|error| save_error(&self.label, &error))
    }

    /// Appends a tensor's elements as `dtype`. `transpose` is the shape `[rows, columns]` of a
    /// matrix whose transpose is to be written.
    pub(in crate::checkpoint) fn tensor(
        &mut self,
        elements: &[f32],
        transpose: Option<[usize; 2]>,
        dtype: SaveDtype,
    ) -> Result<(), SaveError> {
        if cfg!(target_endian = "little") && transpose.is_none() && dtype == SaveDtype::F32 {
            return self.write(bytemuck::cast_slice(elements));
        }
        let at = |index: usize| match transpose {
            None => index,
            Some([rows, columns]) => (index % rows) * columns + index / rows,
        };
        let mut chunk = Vec::with_capacity(CHUNK * 4);
        for start in (0..elements.len()).step_by(CHUNK) {
            let indices = start..(start + CHUNK).min(elements.len());
            let values = indices.map(|index| elements[at(index)]);
            chunk.clear();
            match dtype {
                SaveDtype::F32 => values.for_each(|x| chunk.extend_from_slice(&x.to_le_bytes())),
                SaveDtype::Bf16 => values.for_each(|x| {
                    chunk.extend_from_slice(&half::bf16::from_f32(x).to_le_bytes());
                }),
                SaveDtype::F16 => values.for_each(|x| {
                    chunk.extend_from_slice(&half::f16::from_f32(x).to_le_bytes());
                }),
            }
            self.write(&chunk)?;
        }
        Ok(())
    }

    /// Appends the transpose of a matrix of shape `[rows, columns]` with elements of `size` bytes.
    pub(in crate::checkpoint) fn transposed(
        &mut self,
        bytes: &[u8],
        [rows, columns]: [usize; 2],
        size: usize,
    ) -> Result<(), SaveError> {
        let mut column = Vec::with_capacity(rows * size);
        for at in 0..columns {
            column.clear();
            for row in 0..rows {
                let start = (row * columns + at) * size;
                column.extend_from_slice(&bytes[start..start + size]);
            }
            self.write(&column)?;
        }
        Ok(())
    }

    /// Flushes the file to disk.
    pub(in crate::checkpoint) fn complete(self) -> Result<CompleteFile, SaveError> {
        let Self { label, scratch, out } = self;
        let file = out.into_inner().map_err(|error| save_error(&label, error.error()))?;
        // File systems report delayed write errors here, only to the handle that wrote.
        file.sync_all().map_err(|error| save_error(&label, &error))?;
        Ok(CompleteFile { label, scratch })
    }
}

impl CompleteFile {
    /// Renames the file to its path, replacing a file that is there.
    pub(in crate::checkpoint) fn publish(self) -> Result<(), SaveError> {
        let Self { label, scratch } = self;
        scratch.commit().map_err(|error| SaveError::Io { file: label, reason: error.to_string() })
    }
}

/// Writes a file with the given contents, to be published at `path`.
pub(in crate::checkpoint) fn small_file(
    path: &Path,
    contents: &[u8],
) -> Result<CompleteFile, SaveError> {
    let mut file = NewFile::create(path)?;
    file.write(contents)?;
    file.complete()
}

/// Converts a system error to a [`SaveError`] that names `file`.
pub(in crate::checkpoint) fn save_error(file: &str, error: &std::io::Error) -> SaveError {
    SaveError::Io { file: file.to_string(), reason: error.to_string() }
}
