//! Bytes as MiB, for tables and error texts.

/// Converts bytes to MiB (2²⁰ bytes).
pub(crate) fn mib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
