//! The readers of weights files, on bytes in the place of files: for fuzzers.
//!
//! Each function reads every element that the bytes describe, and returns whether it accepts them.

use std::collections::BTreeMap;

use super::mapped::{MappedFile, MappedTensor};
use super::torch::{read_checkpoint, saved_file};
use super::{peft, source};
use crate::error::LoadError;

/// A file of `torch.save`.
pub fn torch_file(bytes: &[u8]) -> bool {
    read(saved_file("bytes", &MappedFile::in_memory(bytes.to_vec())))
}

/// A folder of `torch.distributed.checkpoint`: the length of `.metadata` in four bytes, `.metadata`,
/// and the bytes of all other files.
pub fn distributed_checkpoint(bytes: &[u8]) -> bool {
    let Some((length, rest)) = bytes.split_first_chunk() else { return false };
    let length = u32::from_le_bytes(*length) as usize;
    let (metadata, file) = rest.split_at_checked(length).unwrap_or((rest, &[]));
    let file = MappedFile::in_memory(file.to_vec());
    read(read_checkpoint("bytes", metadata, |_| Ok(file.clone())))
}

/// A safetensors file.
pub fn safetensors(bytes: &[u8]) -> bool {
    read(source::safetensors_file("bytes", &MappedFile::in_memory(bytes.to_vec())))
}

/// A Burn record.
pub fn burn_record(bytes: &[u8]) -> bool {
    read(source::record_file("bytes", &MappedFile::in_memory(bytes.to_vec())))
}

/// An index of weights files.
pub fn weights_index(bytes: &[u8]) -> bool {
    source::read_index(bytes).is_ok_and(|(_, problems)| problems.is_empty())
}

/// The settings of PEFT's adapters.
pub fn peft_config(bytes: &[u8]) -> bool {
    peft::parse_config(bytes)
}

/// Reads all elements of a few tensors and of their transposes.
fn read(tensors: Result<BTreeMap<String, MappedTensor>, LoadError>) -> bool {
    for tensor in tensors.iter().flat_map(BTreeMap::values).take(16) {
        let elements = super::mapped::elements(&tensor.shape).unwrap_or(0);
        assert!(tensor.bytes() <= (1 << 30), "a tensor larger than its file");
        let mut count = 0;
        tensor.runs(true, std::slice::from_ref(&(0..elements)), |run| count += run.count);
        if count > 0 {
            assert_eq!((count, tensor.row_major_bytes().len() as u64), (elements, tensor.bytes()));
        }
    }
    tensors.is_ok()
}
