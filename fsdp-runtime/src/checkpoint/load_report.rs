//! The report of a load of weights or of a state dict.

/// Result of loading pretrained weights, or a state dict with options.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LoadReport {
    /// Number of parameters loaded.
    pub loaded: usize,
    /// Keys of the model that the file or state lacks and that the options allow it to lack.
    pub missing: Vec<String>,
    /// Keys of the file or state that the model lacks and that the options allow to skip.
    pub unexpected: Vec<String>,
    /// Keys of another shape or dtype in the file, each with a description of the difference. Empty
    /// unless [`LoadOptions::with_strict`](crate::pretrained::LoadOptions::with_strict) allows differences.
    pub misshapen: Vec<String>,
    /// Keys of the file or state whose parameters the filter leaves out.
    pub filtered: Vec<String>,
}
