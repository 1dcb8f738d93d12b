//! One rank's safetensors file: flat pieces of tensors, written in one pass and read in parts.
//!
//! Imports: header ← reader, writer.

mod header;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

pub(super) use self::reader::RankFileReader;
pub(super) use self::writer::RankFileWriter;

/// Reads the bytes of a rank's file as far as its header, for a fuzzer. Returns whether it accepts
/// them.
pub fn parse_bytes(bytes: &[u8]) -> bool {
    let Some((length, rest)) = bytes.split_first_chunk() else { return false };
    let Ok(length) = usize::try_from(u64::from_le_bytes(*length)) else { return false };
    let Some((header, _)) = rest.split_at_checked(length) else { return false };
    let data = (header::LENGTH_BYTES + length) as u64..bytes.len() as u64;
    let Ok(tensors) = header::parse_header(header, data.clone()) else { return false };
    for tensor in tensors.values() {
        let (start, end) = (tensor.bytes.start, tensor.bytes.end);
        assert!(data.start <= start && start <= end && end <= data.end, "outside of the file");
    }
    true
}
