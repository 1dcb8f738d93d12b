//! The checksum at the end of a manifest, of the text before it.

const SEAL: &str = ",\"checksum_of_the_above\":\"";

/// A JSON object with the checksum of its text as its last field.
#[doc(hidden)]
pub fn seal(body: &str) -> String {
    let open = body.trim_end().strip_suffix('}').unwrap_or(body);
    format!("{open}{SEAL}{:08x}\"}}\n", crc32c::crc32c(open.as_bytes()))
}

/// The object without its checksum.
pub(crate) fn unseal(text: &[u8]) -> Result<Vec<u8>, String> {
    let len = SEAL.len() + 8 + "\"}\n".len();
    let found = text.len().checked_sub(len).map(|at| text.split_at(at));
    let Some((open, tail)) = found.filter(|(_, tail)| tail.starts_with(SEAL.as_bytes())) else {
        return Err("it does not end with its checksum; it was edited or cut".into());
    };
    let expected = format!("{SEAL}{:08x}\"}}\n", crc32c::crc32c(open));
    if tail != expected.as_bytes() {
        return Err("its checksum is not that of its text; it was edited or damaged".into());
    }
    Ok([open, b"}"].concat())
}
