//! Writes safetensors files as a stream: the header first, as all shapes are known, then one tensor
//! after another.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use burn_pack::AtomicFile;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::{SaveDtype, SaveError};

/// Elements converted at a time.
const CHUNK: usize = 1 << 14;

/// A tensor to come.
#[derive(Clone, Debug)]
pub(crate) struct Header {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: Dtype,
    /// Its length in bytes.
    pub(crate) bytes: u64,
}

impl SaveDtype {
    /// As safetensors names it.
    pub(crate) fn stored(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
        }
    }
}

/// A file that takes its name once it is complete. Dropped before, it leaves nothing.
pub(crate) struct NewFile {
    label: String,
    scratch: AtomicFile,
    out: BufWriter<File>,
}

/// A file written and flushed to disk, still without its name.
pub(crate) struct Complete {
    label: String,
    scratch: AtomicFile,
}

impl NewFile {
    /// Begins a file.
    pub(crate) fn create(path: &Path) -> Result<Self, SaveError> {
        let label = path.display().to_string();
        match AtomicFile::create(path) {
            Ok((scratch, file)) => {
                Ok(Self { label, scratch, out: BufWriter::with_capacity(1 << 18, file) })
            }
            Err(error) => Err(SaveError::Io { file: label, reason: error.to_string() }),
        }
    }

    /// Begins a safetensors file with its header.
    pub(crate) fn safetensors(path: &Path, tensors: &[Header]) -> Result<Self, SaveError> {
        let mut header = Map::new();
        // As transformers writes it, and asks for.
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
        // The data is aligned to 8 bytes.
        text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
        let mut file = Self::create(path)?;
        file.write(&(text.len() as u64).to_le_bytes())?;
        file.write(text.as_bytes())?;
        Ok(file)
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), SaveError> {
        self.out.write_all(bytes).map_err(|error| failed(&self.label, &error))
    }

    /// Writes a tensor's elements, `[rows, columns]` of which the transpose goes to the file.
    pub(crate) fn tensor(
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

    /// Writes the transpose of a matrix of `[rows, columns]` whose elements have `size` bytes each.
    pub(crate) fn transposed(
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
    pub(crate) fn complete(self) -> Result<Complete, SaveError> {
        let Self { label, scratch, out } = self;
        let file = out.into_inner().map_err(|error| failed(&label, error.error()))?;
        // What a file system has put off it reports here, to the handle that wrote.
        file.sync_all().map_err(|error| failed(&label, &error))?;
        Ok(Complete { label, scratch })
    }
}

impl Complete {
    /// Gives the file its name, in place of one that has it.
    pub(crate) fn publish(self) -> Result<(), SaveError> {
        let Self { label, scratch } = self;
        scratch.commit().map_err(|error| SaveError::Io { file: label, reason: error.to_string() })
    }
}

/// Writes a small file in the same way.
pub(crate) fn whole(path: &Path, contents: &[u8]) -> Result<Complete, SaveError> {
    let mut file = NewFile::create(path)?;
    file.write(contents)?;
    file.complete()
}

pub(crate) fn failed(file: &str, error: &std::io::Error) -> SaveError {
    SaveError::Io { file: file.to_string(), reason: error.to_string() }
}
