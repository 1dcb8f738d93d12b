//! The checksum that ends a manifest: CRC-32C of all the text before it.

/// Text between the manifest's last field and the checksum's eight hexadecimal digits.
const FIELD: &str = ",\"checksum_of_the_above\":\"";

/// Returns a JSON object with the checksum of its text added as the last field.
#[doc(hidden)]
pub fn seal(body: &str) -> String {
    let open = body.trim_end().strip_suffix('}').unwrap_or(body);
    format!("{open}{FIELD}{:08x}\"}}\n", crc32c::crc32c(open.as_bytes()))
}

/// Checks the checksum and returns the object without it.
pub(super) fn unseal(text: &[u8]) -> Result<Vec<u8>, String> {
    let len = FIELD.len() + 8 + "\"}\n".len();
    let found = text.len().checked_sub(len).map(|at| text.split_at(at));
    let Some((open, tail)) = found.filter(|(_, tail)| tail.starts_with(FIELD.as_bytes())) else {
        return Err("it does not end with its checksum; it was edited or truncated".into());
    };
    let expected = format!("{FIELD}{:08x}\"}}\n", crc32c::crc32c(open));
    if tail != expected.as_bytes() {
        return Err("its checksum does not match its text; it was edited or damaged".into());
    }
    Ok([open, b"}"].concat())
}
