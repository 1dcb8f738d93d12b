//! Launches that go through several tensors: what the vectors of each are, and which unit takes them.

use cubecl::client::Client;
use cubecl::prelude::*;

use super::{Run, Span, grid, on_cpu, spans_within};

/// How units share out the vectors of a launch: `lanes` neighbouring units go through a tile of
/// `lanes · rows` vectors together, row by row. A tile is part of one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Tile {
    pub(super) lanes: usize,
    pub(super) rows: usize,
}

impl Tile {
    /// A unit of a CPU runs through its own cache lines; elsewhere neighbours read neighbours.
    pub(super) fn new(client: &Client) -> Self {
        match on_cpu(client) {
            true => Self { lanes: 1, rows: 64 },
            false => Self { lanes: 32, rows: 4 },
        }
    }

    /// Tiles that `vectors` are cut into.
    fn count(&self, vectors: usize) -> usize {
        vectors.div_ceil(self.lanes * self.rows)
    }

    /// Units for all tiles of one tensor.
    pub(super) fn grid(&self, client: &Client, vectors: usize) -> (CubeCount, CubeDim) {
        grid(client, self.count(vectors) * self.lanes)
    }
}

/// The tile of a launch that this unit has part in.
#[cube]
pub(super) fn own_tile(#[comptime] tile: Tile) -> usize {
    ABSOLUTE_POS / comptime!(tile.lanes)
}

/// The first vector of this unit in a tile of its tensor. The next is `lanes` further.
#[cube]
pub(super) fn begin(at: usize, #[comptime] tile: Tile) -> usize {
    at * comptime!(tile.lanes * tile.rows) + ABSOLUTE_POS % comptime!(tile.lanes)
}

/// Where a tile ends, in a tensor of `count` vectors.
#[cube]
pub(super) fn end(at: usize, count: usize, #[comptime] tile: Tile) -> usize {
    min((at + 1) * comptime!(tile.lanes * tile.rows), count)
}

/// Runs of one length that a kernel goes through side by side.
pub(super) struct Job<const K: usize> {
    pub(super) runs: [Run; K],
    pub(super) numel: usize,
}

/// Spans of one width, at most one of each of several jobs whose runs have the same dtypes.
pub(super) struct Batch<'a, const K: usize> {
    pub(super) width: usize,
    pub(super) tile: Tile,
    /// The jobs' places among all, and the spans.
    pub(super) parts: Vec<(usize, Span)>,
    jobs: &'a [Job<K>],
}

impl<const K: usize> Batch<'_, K> {
    /// The first of its jobs.
    pub(super) fn first(&self) -> &Job<K> {
        &self.jobs[self.parts[0].0]
    }

    /// The buffers of one run of each job.
    pub(super) fn buffers<S: FromIterator<BufferArg>>(&self, run: usize) -> S {
        let argument = |(job, span): &(usize, Span)| span.argument(&self.jobs[*job].runs[run]).0;
        self.parts.iter().map(argument).collect()
    }

    /// The vector of each of those buffers that its span begins with.
    pub(super) fn firsts<S: FromIterator<usize>>(&self, run: usize) -> S {
        let first = |(job, span): &(usize, Span)| span.argument(&self.jobs[*job].runs[run]).1;
        self.parts.iter().map(first).collect()
    }

    /// The buffer that a run of all jobs lies in.
    pub(super) fn shared(&self, run: usize) -> BufferArg {
        self.first().runs[run].argument()
    }

    /// The vector of the shared buffer that each span begins with.
    pub(super) fn places<S: FromIterator<usize>>(&self, run: usize) -> S {
        let place =
            |(job, span): &(usize, Span)| (self.jobs[*job].runs[run].at + span.start) / self.width;
        self.parts.iter().map(place).collect()
    }

    /// Vectors of each part.
    pub(super) fn counts<S: FromIterator<usize>>(&self) -> S {
        self.parts.iter().map(|(_, span)| span.count).collect()
    }

    /// Tiles of each part.
    pub(super) fn tiles<S: FromIterator<usize>>(&self) -> S {
        self.parts.iter().map(|(_, span)| self.tile.count(span.count)).collect()
    }

    /// Units for all tiles.
    pub(super) fn grid(&self, client: &Client) -> (CubeCount, CubeDim) {
        grid(client, self.tiles::<Vec<_>>().iter().sum::<usize>() * self.tile.lanes)
    }
}

/// The jobs' spans, `most` to a launch, or as many as the device has room for the buffers of. Run
/// `shared`, if any, lies in one buffer for all jobs, which a launch has once.
///
/// # Panics
///
/// Where a run has fewer elements than its job.
pub(super) fn batches<'a, const K: usize>(
    client: &Client,
    jobs: &'a [Job<K>],
    shared: Option<usize>,
    most: usize,
) -> Vec<Batch<'a, K>> {
    let tile = Tile::new(client);
    // One more buffer at least goes with the shared one, and the scalars may be one, too.
    let bindings = client.properties().hardware.max_bindings as usize;
    let own = K - usize::from(shared.is_some());
    let most = most.min(bindings.saturating_sub(3) / own).max(1);
    let dtypes = |job: &Job<K>| job.runs.each_ref().map(|run| run.dtype);
    let mut batches: Vec<Batch<'a, K>> = Vec::new();
    for (index, job) in jobs.iter().enumerate() {
        let block = shared.map_or(0, |run| job.runs[run].at);
        for span in spans_within(client, &job.runs.each_ref(), job.numel, block) {
            let alike = |batch: &&mut Batch<'a, K>| {
                batch.width == span.width && dtypes(batch.first()) == dtypes(job)
            };
            match batches.iter_mut().rev().find(alike) {
                Some(batch) if batch.parts.len() < most => batch.parts.push((index, span)),
                _ => {
                    let width = span.width;
                    batches.push(Batch { width, tile, parts: vec![(index, span)], jobs });
                }
            }
        }
    }
    batches
}
