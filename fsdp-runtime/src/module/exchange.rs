//! What happens to a tensor between tensor parallel ranks.

/// An exchange of a tensor between tensor parallel ranks.
///
/// The *sequence* is the dimension before the last: the positions of a row. Under sequence parallel each rank has
/// a part of it outside of split layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exchange {
    /// The ranks have the tensor, and use it with parts of matrices. Its gradient is the sum of theirs.
    Shared,
    /// The ranks add their tensors. The gradient is the same on all ranks.
    Summed,
    /// The ranks join their tensors along the last dimension. The gradient is this rank's part.
    Gathered,
    /// The ranks join their parts of the sequence, and use the whole with parts of matrices. The gradient is this
    /// rank's part of the sum of theirs.
    SequenceShared,
    /// The ranks add their tensors, and each takes its part of the sequence. The gradient is that of the whole
    /// sequence.
    SequenceSummed,
    /// The ranks have the tensor, and each takes its part of the sequence. The gradient is that of the whole
    /// sequence.
    SequencePart,
    /// The ranks join their parts of the sequence. The gradient, which is the same on all ranks, is this rank's
    /// part.
    SequenceGathered,
}
