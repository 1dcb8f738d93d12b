//! Kernel launches that each process several tensors.

use burn::tensor::DType;
use cubecl::client::Client;
use cubecl::prelude::*;

use super::buffer_slice::BufferSlice;
use super::span::{Span, grid, spans_within};
use super::tile::Tile;

/// Work on one tensor: an elementwise operation on the first `numel` elements of the slices.
pub(super) struct Job {
    pub(super) slices: Vec<BufferSlice>,
    pub(super) numel: usize,
}

impl Job {
    fn dtypes(&self) -> impl Iterator<Item = DType> {
        self.slices.iter().map(|slice| slice.dtype)
    }
}

/// Launch of a kernel for spans of equal width, at most one of each job. The jobs have equally many
/// slices, of equal dtypes. Methods return kernel arguments with one entry for each span, in the
/// order of `parts`.
pub(super) struct Launch<'a> {
    /// Number of elements of a vector.
    pub(super) width: usize,
    /// How threads divide the vectors of a span.
    pub(super) tile: Tile,
    /// Index of each span's job, and the span.
    pub(super) parts: Vec<(usize, Span)>,
    jobs: &'a [Job],
}

impl Launch<'_> {
    /// Returns the job of the first span.
    pub(super) fn first_job(&self) -> &Job {
        &self.jobs[self.parts[0].0]
    }

    /// Returns one buffer for each span: the one that holds slice number `slice` of the span's job.
    pub(super) fn buffers<S: FromIterator<BufferArg>>(&self, slice: usize) -> S {
        let argument =
            |(job, span): &(usize, Span)| span.argument(&self.jobs[*job].slices[slice]).0;
        self.parts.iter().map(argument).collect()
    }

    /// Returns the index of each span's first vector in the corresponding buffer of
    /// [`buffers`](Self::buffers).
    pub(super) fn firsts<S: FromIterator<usize>>(&self, slice: usize) -> S {
        let first = |(job, span): &(usize, Span)| span.first(&self.jobs[*job].slices[slice]);
        self.parts.iter().map(first).collect()
    }

    /// Returns the buffer that holds slice number `slice` of every job, for launches in which all
    /// jobs share it.
    pub(super) fn shared_buffer(&self, slice: usize) -> BufferArg {
        let of_spans = self.parts.iter().map(|(_, span)| span.count * span.width);
        self.first_job().slices[slice].argument_of(of_spans.sum())
    }

    /// Returns the index of each span's first vector in [`shared_buffer`](Self::shared_buffer).
    pub(super) fn shared_firsts<S: FromIterator<usize>>(&self, slice: usize) -> S {
        let first = |(job, span): &(usize, Span)| {
            (self.jobs[*job].slices[slice].start + span.start) / self.width
        };
        self.parts.iter().map(first).collect()
    }

    /// Returns the number of vectors of each span.
    pub(super) fn counts<S: FromIterator<usize>>(&self) -> S {
        self.parts.iter().map(|(_, span)| span.count).collect()
    }

    /// Returns the number of tiles of each span.
    pub(super) fn tiles<S: FromIterator<usize>>(&self) -> S {
        self.parts.iter().map(|(_, span)| self.tile.count(span.count)).collect()
    }

    /// Returns a grid with threads for all tiles of all spans.
    pub(super) fn grid(&self, client: &Client) -> (CubeCount, CubeDim) {
        grid(client, self.tiles::<Vec<_>>().iter().sum::<usize>() * self.tile.lanes)
    }
}

/// Distributes the spans of all jobs over launches of at most `max_parts` spans, or fewer if the
/// device binds fewer buffers to a kernel. If `shared` is the index of a slice, that slice of all
/// jobs belongs to one buffer, which a launch binds once.
///
/// # Panics
///
/// If a slice has fewer elements than its job.
pub(super) fn launches<'a>(
    client: &Client,
    jobs: &'a [Job],
    shared: Option<usize>,
    max_parts: usize,
) -> Vec<Launch<'a>> {
    let Some(most_slices) = jobs.iter().map(|job| job.slices.len()).max() else {
        return Vec::new();
    };
    let tile = Tile::new(client);
    // Three bindings are reserved: the shared buffer, a buffer that orders the launch, and the
    // scalars.
    let bindings = client.properties().hardware.max_bindings as usize;
    let own_buffers = most_slices - usize::from(shared.is_some());
    let max_parts = max_parts.min(bindings.saturating_sub(3) / own_buffers).max(1);
    let mut launches: Vec<Launch<'a>> = Vec::new();
    for (index, job) in jobs.iter().enumerate() {
        let block = shared.map_or(0, |slice| job.slices[slice].start);
        let slices: Vec<_> = job.slices.iter().collect();
        for span in spans_within(client, &slices, job.numel, block) {
            let is_alike = |launch: &&mut Launch<'a>| {
                launch.width == span.width && launch.first_job().dtypes().eq(job.dtypes())
            };
            match launches.iter_mut().rev().find(is_alike) {
                Some(launch) if launch.parts.len() < max_parts => launch.parts.push((index, span)),
                _ => {
                    let width = span.width;
                    launches.push(Launch { width, tile, parts: vec![(index, span)], jobs });
                }
            }
        }
    }
    launches
}
