//! The header of a safetensors file.

use std::collections::HashMap;
use std::ops::Range;

use serde::Deserialize;

use crate::checkpoint::manifest::Dtype;

/// Number of bytes of the field before the header that holds the header's length.
pub(super) const LENGTH_BYTES: usize = 8;

/// Entry of a tensor in a header.
#[derive(Clone, Debug)]
pub(super) struct TensorHeader {
    pub(super) dtype: String,
    pub(super) numel: u64,
    /// Range of the tensor's bytes in the file.
    pub(super) bytes: Range<u64>,
}

/// Parses a safetensors header whose tensors lie in the byte range `data` of the file. Checks that
/// each tensor's dtype, shape and byte range agree.
pub(super) fn parse_header(
    header: &[u8],
    data: Range<u64>,
) -> Result<HashMap<String, TensorHeader>, String> {
    #[derive(Deserialize)]
    struct Info {
        dtype: String,
        shape: Vec<u64>,
        data_offsets: (u64, u64),
    }
    let fields: HashMap<String, serde_json::Value> = serde_json::from_slice(header)
        .map_err(|error| format!("its header is not a safetensors header: {error}"))?;
    let mut tensors = HashMap::with_capacity(fields.len());
    for (name, value) in fields {
        if name == "__metadata__" {
            continue;
        }
        let info: Info = serde_json::from_value(value)
            .map_err(|error| format!("its header, `{name}`: {error}"))?;
        let outside = || format!("its header places `{name}` outside of the file");
        let position = |offset: u64| data.start.checked_add(offset).filter(|&at| at <= data.end);
        let (start, end) = info.data_offsets;
        let bytes = position(start).ok_or_else(outside)?..position(end).ok_or_else(outside)?;
        let numel = info.shape.iter().try_fold(1u64, |numel, &dim| numel.checked_mul(dim));
        let size = serde_json::from_value::<Dtype>(info.dtype.clone().into()).map(Dtype::size);
        let needed = size.ok().zip(numel).and_then(|(size, numel)| numel.checked_mul(size as u64));
        match (numel, needed) {
            (Some(numel), Some(needed)) if bytes.start.checked_add(needed) == Some(bytes.end) => {
                tensors.insert(name, TensorHeader { dtype: info.dtype, numel, bytes });
            }
            _ => return Err(format!("its header gives `{name}` a wrong dtype, shape or offset")),
        }
    }
    Ok(tensors)
}
