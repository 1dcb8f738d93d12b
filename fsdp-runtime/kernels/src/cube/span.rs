//! Spans: the vectors and single elements that a launch splits a tensor into.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;

/// Consecutive vectors of equal width.
pub(super) struct Span {
    /// Index of the first element, counted from the start of the split elements.
    pub(super) start: usize,
    /// Number of elements of a vector.
    pub(super) width: usize,
    /// Number of vectors.
    pub(super) count: usize,
    /// Whether the device loads vectors from any address.
    unaligned_io: bool,
}

impl Span {
    /// Returns a slice's buffer as a kernel argument, and the index in it of the span's first
    /// vector.
    pub(super) fn argument(&self, slice: &BufferSlice) -> (BufferArg, usize) {
        let first = slice.start + self.start;
        let elements = (self.count * self.width).min(slice.len().saturating_sub(self.start));
        if !self.unaligned_io {
            return (slice.argument_of(elements), self.first(slice));
        }
        let handle = slice.handle.clone().offset_start((first * slice.dtype.size()) as u64);
        (BufferSlice { handle, ..slice.clone() }.argument_of(elements), 0)
    }

    /// Returns the index that [`argument`](Self::argument) returns.
    pub(super) fn first(&self, slice: &BufferSlice) -> usize {
        if self.unaligned_io { 0 } else { (slice.start + self.start) / self.width }
    }

    /// Returns a grid with one thread for each vector.
    pub(super) fn grid(&self, client: &Client) -> (CubeCount, CubeDim) {
        grid(client, self.count)
    }
}

/// Returns a grid of at least this many threads.
pub(super) fn grid(client: &Client, threads: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, threads);
    (cubecl::calculate_cube_count_elemwise(client, threads, dim), dim)
}

/// Splits `numel` elements, taken from the start of each slice, into vectors and remaining single
/// elements.
///
/// # Panics
///
/// If a slice has fewer than `numel` elements.
pub(super) fn spans(client: &Client, slices: &[&BufferSlice], numel: usize) -> Vec<Span> {
    spans_within(client, slices, numel, 0)
}

/// Splits like [`spans`], with a vector width that divides `block`.
pub(super) fn spans_within(
    client: &Client,
    slices: &[&BufferSlice],
    numel: usize,
    block: usize,
) -> Vec<Span> {
    check_len(slices, numel);
    let unaligned_io = client.features().unaligned_io;
    let width = widest(client, slices, block);
    let in_vectors = numel / width * width;
    let vectors = Span { start: 0, width, count: in_vectors / width, unaligned_io };
    let singles = Span { start: in_vectors, width: 1, count: numel - in_vectors, unaligned_io };
    [vectors, singles].into_iter().filter(|span| span.count > 0).collect()
}

/// Returns the vectors of a tensor's rows as one span. Their width divides the row's length and suits
/// all slices: those of `tensors`, which have `numel` elements each, and those of `parameters`, which
/// have a row's length.
///
/// # Panics
///
/// If a slice has fewer elements.
pub(super) fn row_span(
    client: &Client,
    tensors: &[&BufferSlice],
    parameters: &[&BufferSlice],
    numel: usize,
    row_len: usize,
) -> Span {
    check_len(tensors, numel);
    check_len(parameters, row_len);
    let unaligned_io = client.features().unaligned_io;
    let width = widest(client, &[tensors, parameters].concat(), row_len);
    Span { start: 0, width, count: numel / width, unaligned_io }
}

/// Panics if a slice has fewer than `numel` elements.
fn check_len(slices: &[&BufferSlice], numel: usize) {
    for slice in slices {
        assert!(
            numel <= slice.len(),
            "a kernel must stay within its buffers: {numel} elements of {}",
            slice.len()
        );
    }
}

/// Returns the widest vector width that divides `block` and that the device can load from all
/// slices.
fn widest(client: &Client, slices: &[&BufferSlice], block: usize) -> usize {
    let unaligned_io = client.features().unaligned_io;
    let size = slices.iter().map(|slice| slice.dtype.size()).max().unwrap_or(size_of::<f32>());
    let is_aligned = |slice: &&BufferSlice, width: usize| {
        let vector_bytes = (width * slice.dtype.size()) as u64;
        slice.byte_offset().is_multiple_of(vector_bytes) && slice.start.is_multiple_of(width)
    };
    let fits = |&width: &usize| {
        (unaligned_io || slices.iter().all(|slice| is_aligned(slice, width)))
            && block.is_multiple_of(width)
    };
    client.io_optimized_vector_sizes(size).find(fits).unwrap_or(1)
}
