//! The Python names that a pickle of weights may import, and what each stands for here.

use safetensors::Dtype;

/// A Python name that a pickle may import. Nothing is imported or called: each stands for a step of
/// the reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Global {
    /// `collections.OrderedDict`.
    OrderedDict,
    /// `torch._utils._rebuild_tensor_v2`: a view of a storage.
    RebuildTensor,
    /// `torch._utils._rebuild_parameter`: a tensor that requires a gradient.
    RebuildParameter,
    /// `torch.Size`: a tuple.
    Size,
    /// The class of a storage, such as `torch.FloatStorage`.
    Storage(Dtype),
    /// A dtype, such as `torch.float32`.
    Dtype(Dtype),
    /// A class of the metadata of a distributed checkpoint.
    Class(Class),
    /// A function or class whose results are not needed, such as `pathlib.PosixPath`.
    Unused,
}

/// A class in the metadata of a distributed checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    Metadata,
    Tensor,
    Bytes,
    Properties,
    Chunk,
    Index,
    StorageInfo,
    StorageMeta,
}

impl Global {
    /// Returns what `module.name` stands for; `None` if weights need no such name.
    pub(super) fn of(module: &str, name: &str) -> Option<Self> {
        const CHECKPOINT: &str = "torch.distributed.checkpoint.metadata";
        const SHARDED_TENSOR: &str = "torch.distributed._shard.sharded_tensor.metadata";
        Some(match (module, name) {
            ("collections", "OrderedDict") => Self::OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2") => Self::RebuildTensor,
            ("torch._utils", "_rebuild_parameter") => Self::RebuildParameter,
            ("torch", "Size") => Self::Size,
            ("torch", "device") => Self::Unused,
            ("torch", name) if name.ends_with("Storage") => Self::Storage(storage(name)?),
            ("torch", name) => Self::Dtype(dtype(name)?),
            (CHECKPOINT, "Metadata") => Self::Class(Class::Metadata),
            (CHECKPOINT, "TensorStorageMetadata") => Self::Class(Class::Tensor),
            (CHECKPOINT, "BytesStorageMetadata") => Self::Class(Class::Bytes),
            (CHECKPOINT | SHARDED_TENSOR, "TensorProperties") => Self::Class(Class::Properties),
            (CHECKPOINT, "ChunkStorageMetadata") => Self::Class(Class::Chunk),
            (CHECKPOINT, "MetadataIndex") => Self::Class(Class::Index),
            (CHECKPOINT, "StorageMeta") => Self::Class(Class::StorageMeta),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo") => {
                Self::Class(Class::StorageInfo)
            }
            (CHECKPOINT, "_MEM_FORMAT_ENCODING")
            | (SHARDED_TENSOR, "MEM_FORMAT_ENCODING")
            | ("torch.serialization", "_get_layout")
            // Python 3.13 has its paths in a module of their own.
            | ("pathlib" | "pathlib._local", "PosixPath" | "PurePosixPath" | "WindowsPath") => {
                Self::Unused
            }
            _ => return None,
        })
    }
}

/// Returns the element type of a class of storages.
fn storage(name: &str) -> Option<Dtype> {
    Some(match name {
        "DoubleStorage" => Dtype::F64,
        "FloatStorage" => Dtype::F32,
        "HalfStorage" => Dtype::F16,
        "BFloat16Storage" => Dtype::BF16,
        "LongStorage" => Dtype::I64,
        "IntStorage" => Dtype::I32,
        "ShortStorage" => Dtype::I16,
        "CharStorage" => Dtype::I8,
        "ByteStorage" => Dtype::U8,
        "BoolStorage" => Dtype::BOOL,
        _ => return None,
    })
}

/// Returns the dtype with this name in `torch`.
fn dtype(name: &str) -> Option<Dtype> {
    Some(match name {
        "float64" => Dtype::F64,
        "float32" => Dtype::F32,
        "float16" => Dtype::F16,
        "bfloat16" => Dtype::BF16,
        "int64" => Dtype::I64,
        "int32" => Dtype::I32,
        "int16" => Dtype::I16,
        "int8" => Dtype::I8,
        "uint8" => Dtype::U8,
        "bool" => Dtype::BOOL,
        _ => return None,
    })
}
