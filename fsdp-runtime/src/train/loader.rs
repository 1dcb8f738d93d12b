//! The data loader of one rank.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::{Dataset, DatasetError};
use burn::tensor::Device;

use super::permutation::permutation;
use super::position::{self, DataOrder, Position};
use super::prefetch::Prefetch;
use crate::error::{Error, LearnerError, raise};
use crate::launch::Worker;
use crate::layout::{Rank, WorldSize};

/// Builder of the [`DataLoader`] of one rank, which loads this rank's part of a dataset.
///
/// Item `i` of an epoch's order goes to rank `i % world`, as with PyTorch's `DistributedSampler`.
/// So the batches with the same number of all ranks together are one batch of `world` times the
/// size.
///
/// | option | default |
/// |---|---|
/// | [`batch_size`](Self::batch_size) | 1 item on each rank |
/// | [`shuffle`](Self::shuffle) | the order of the dataset |
/// | [`equal_lengths`](Self::equal_lengths) | on in training and with `shuffle`, otherwise off |
/// | [`drop_last`](Self::drop_last) | off |
/// | [`prefetch`](Self::prefetch) | 2 batches |
///
/// # Example
///
/// ```
/// use burn::data::dataloader::batcher::Batcher;
/// use burn::data::dataset::InMemDataset;
/// use burn::tensor::Device;
/// use fsdp_runtime::prelude::*;
/// use fsdp_runtime::train::RankLoader;
///
/// struct Numbers;
///
/// impl Batcher<u8, Vec<u8>> for Numbers {
///     fn batch(&self, items: Vec<u8>, _: &Device) -> Vec<u8> {
///         items
///     }
/// }
///
/// # fn main() -> Result<(), fsdp_runtime::errors::LaunchError> {
/// let ranks = launch(LaunchOptions::new(2), |worker| {
///     let items = InMemDataset::new((0..7).collect());
///     let loader = RankLoader::new(Numbers, items, &worker).batch_size(2).build();
///     loader.iter().map(|batch| Ok::<_, Error>(batch.unwrap())).collect::<Result<Vec<_>, _>>()
/// })?;
/// assert_eq!(ranks[0], [vec![0, 2], vec![4, 6]]);
/// assert_eq!(ranks[1], [vec![1, 3], vec![5]]);
/// # Ok(())
/// # }
/// ```
#[must_use]
pub struct RankLoader<I, O> {
    source: Source<I, O>,
    rank: Rank,
    world: WorldSize,
    batch_size: usize,
    shuffle: Option<u64>,
    equal_lengths: Option<bool>,
    drop_last: bool,
    prefetch: usize,
}

impl<I, O> fmt::Debug for RankLoader<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RankLoader")
            .field("items", &self.source.dataset.len())
            .field("rank", &self.rank)
            .field("world", &self.world)
            .field("batch_size", &self.batch_size)
            .finish_non_exhaustive()
    }
}

/// Dataset and batcher that a rank's batches are made of, and the batches' device.
struct Source<I, O> {
    batcher: Arc<dyn Batcher<I, O>>,
    dataset: Arc<dyn Dataset<I>>,
    device: Device,
}

impl<I, O> Clone for Source<I, O> {
    fn clone(&self) -> Self {
        Self {
            batcher: self.batcher.clone(),
            dataset: self.dataset.clone(),
            device: self.device.clone(),
        }
    }
}

impl<I, O> RankLoader<I, O>
where
    I: Send + Sync + Clone + 'static,
    O: Send + 'static,
{
    /// Creates the builder for this rank. Every rank passes the same dataset.
    pub fn new(
        batcher: impl Batcher<I, O> + 'static,
        dataset: impl Dataset<I> + 'static,
        worker: &Worker,
    ) -> Self {
        let device = worker.device().clone();
        Self {
            source: Source { batcher: Arc::new(batcher), dataset: Arc::new(dataset), device },
            rank: worker.rank(),
            world: worker.world(),
            batch_size: 1,
            shuffle: None,
            equal_lengths: None,
            drop_last: false,
            prefetch: 2,
        }
    }

    /// Sets the number of items in a batch of one rank, at least 1.
    pub fn batch_size(mut self, items: usize) -> Self {
        self.batch_size = items.max(1);
        self
    }

    /// Shuffles the items in each epoch. The order is a function of the seed and of the epoch, and
    /// so the same on all ranks and in a resumed run.
    pub fn shuffle(mut self, seed: u64) -> Self {
        self.shuffle = Some(seed);
        self
    }

    /// Sets whether all ranks get equally many items. Default: with [`shuffle`](Self::shuffle),
    /// and where a [`FsdpStrategy`](super::FsdpStrategy) trains on the loader's batches.
    ///
    /// If the number of items is not a multiple of the number of ranks, the first items of the
    /// epoch's order are used twice, as in PyTorch.
    ///
    /// Training needs equal lengths: set them in a training loop of your own. Validation without
    /// them counts every item once.
    pub fn equal_lengths(mut self, equal: bool) -> Self {
        self.equal_lengths = Some(equal);
        self
    }

    /// Sets whether the items at the end of an epoch that do not fill a batch on every rank are
    /// left out.
    pub fn drop_last(mut self, drop: bool) -> Self {
        self.drop_last = drop;
        self
    }

    /// Sets how many batches a thread prepares while the model computes. With 0, each batch is
    /// prepared when it is needed.
    pub fn prefetch(mut self, batches: usize) -> Self {
        self.prefetch = batches;
        self
    }

    /// Returns the data loader.
    ///
    /// # Panics
    ///
    /// Unwinds with [`LearnerError::TooFewItems`] if a rank would have no batch; `launch` returns
    /// the error.
    pub fn build(self) -> Arc<dyn DataLoader<O>> {
        let items = self.source.dataset.len();
        let needed = self.world.size() * if self.drop_last { self.batch_size } else { 1 };
        if items < needed {
            let world = self.world;
            raise(Error::Learner(LearnerError::TooFewItems { items, world, needed }));
        }
        let (len, train_len) = (self.own_items(items, false), self.own_items(items, true));
        Arc::new(Batches {
            source: self.source.clone(),
            order: Order {
                items,
                rank: self.rank.index(),
                world: self.world.size(),
                shuffle: self.shuffle,
                first: 0,
                len,
                train_len,
            },
            available: items.div_ceil(self.world.size()),
            batch_size: self.batch_size,
            prefetch: self.prefetch,
            epochs: AtomicU64::new(0),
        })
    }

    /// Returns the number of this rank's items in an epoch, of training or of another use.
    fn own_items(&self, items: usize, trains: bool) -> usize {
        let (rank, world) = (self.rank.index(), self.world.size());
        if self.drop_last {
            let batch = world * self.batch_size;
            items / batch * self.batch_size
        } else if self.equal_lengths.unwrap_or(trains || self.shuffle.is_some()) {
            items.div_ceil(world)
        } else {
            (items + world - 1 - rank) / world
        }
    }
}

/// Items of the dataset that this rank uses, in order.
#[derive(Clone, Copy, Debug)]
struct Order {
    /// Number of items in the dataset.
    items: usize,
    rank: usize,
    world: usize,
    shuffle: Option<u64>,
    /// First of this rank's items that is loaded.
    first: usize,
    /// Number of this rank's items that are loaded.
    len: usize,
    /// Number of this rank's items that are loaded in training.
    train_len: usize,
}

impl Order {
    fn len(&self, trains: bool) -> usize {
        if trains { self.train_len } else { self.len }
    }

    /// Returns the numbers of this rank's items in an epoch, without those before the position.
    fn of_epoch(&self, start: Position) -> Vec<usize> {
        let places = (self.first + start.items..self.first + self.len(start.trains))
            .map(|number| (self.rank + number * self.world) % self.items);
        match self.shuffle {
            Some(seed) => {
                let order = permutation(self.items, seed, start.epoch);
                places.map(|place| order[place]).collect()
            }
            None => places.collect(),
        }
    }
}

/// The data loader that [`RankLoader`] builds.
struct Batches<I, O> {
    source: Source<I, O>,
    order: Order,
    /// Largest number of items of a rank, with those that `drop_last` leaves out.
    available: usize,
    batch_size: usize,
    prefetch: usize,
    /// Number of iterators so far: each is an epoch, unless the strategy says which one it is.
    epochs: AtomicU64,
}

impl<I, O> Batches<I, O> {
    fn with(&self, source: Source<I, O>, order: Order, available: usize) -> Self {
        let epochs = AtomicU64::new(self.epochs.load(Ordering::Relaxed));
        let (batch_size, prefetch) = (self.batch_size, self.prefetch);
        Self { source, order, available, batch_size, prefetch, epochs }
    }
}

impl<I, O> DataLoader<O> for Batches<I, O>
where
    I: Send + Sync + Clone + 'static,
    O: Send + 'static,
{
    /// Returns the iterator over the batches of an epoch.
    ///
    /// # Panics
    ///
    /// Unwinds with [`LearnerError::PositionBeyondData`] if a resumed run had used more items of
    /// the epoch than there are; `launch` returns the error.
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<O> + 'a> {
        let epoch = || self.epochs.load(Ordering::Relaxed);
        let next = || Position { epoch: epoch(), ..Position::default() };
        let start = position::take().unwrap_or_else(next);
        self.epochs.store(start.epoch + 1, Ordering::Relaxed);
        // A checkpoint within an epoch is saved before the last batch of its dataset.
        if start.items > 0 && start.items >= self.available {
            raise(start.beyond(self.available).into());
        }
        let total = self.order.len(start.trains);
        // Another number of ranks, with `drop_last`, can leave out more items at the end.
        let start = Position { items: start.items.min(total), ..start };
        let items = self.order.of_epoch(start);
        let size = self.batch_size;
        let sizes = items.chunks(size).map(<[usize]>::len).collect();
        let source = self.source.clone();
        let prepare = move |number: usize| {
            let end = items.len().min((number + 1) * size);
            let batch = source.dataset.get_many(items[number * size..end].to_vec())?;
            Ok(source.batcher.batch(batch, &source.device))
        };
        Box::new(RankIterator::new(sizes, start.items, total, self.prefetch, prepare))
    }

    /// Returns the number of this rank's items in an epoch.
    fn num_items(&self) -> usize {
        let Order { items, world, shuffle, .. } = self.order;
        let batch = (self.batch_size * world) as u64;
        position::report(DataOrder { items: items as u64, seed: shuffle, batch });
        self.order.len(position::trains())
    }

    fn to_device(&self, device: &Device) -> Arc<dyn DataLoader<O>> {
        let source = Source { device: device.clone(), ..self.source.clone() };
        Arc::new(self.with(source, self.order, self.available))
    }

    /// Returns a loader of this rank's items from `start` to before `end`.
    fn slice(&self, start: usize, end: usize) -> Arc<dyn DataLoader<O>> {
        let end = end.min(self.order.len);
        let start = start.min(end);
        let len = end - start;
        let order = Order { first: self.order.first + start, len, train_len: len, ..self.order };
        Arc::new(self.with(self.source.clone(), order, len))
    }
}

/// Way in which an iterator gets its batches.
enum Batching<O> {
    Ahead(Prefetch<O>),
    OnDemand(Box<dyn Fn(usize) -> Result<O, DatasetError> + Send>),
}

/// The iterator over one rank's batches of an epoch.
struct RankIterator<O> {
    batches: Batching<O>,
    /// Numbers of items of the batches.
    sizes: Vec<usize>,
    next: usize,
    processed: usize,
    total: usize,
}

impl<O: Send + 'static> RankIterator<O> {
    fn new(
        sizes: Vec<usize>,
        processed: usize,
        total: usize,
        prefetch: usize,
        prepare: impl Fn(usize) -> Result<O, DatasetError> + Send + 'static,
    ) -> Self {
        let batches = match prefetch {
            0 => Batching::OnDemand(Box::new(prepare)),
            ahead => Batching::Ahead(Prefetch::start(sizes.len(), ahead, prepare)),
        };
        Self { batches, sizes, next: 0, processed, total }
    }
}

impl<O: Send + 'static> Iterator for RankIterator<O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        let size = *self.sizes.get(self.next)?;
        let batch = match &mut self.batches {
            Batching::Ahead(prefetch) => prefetch.next()?,
            Batching::OnDemand(prepare) => prepare(self.next),
        };
        self.next = if batch.is_ok() { self.next + 1 } else { self.sizes.len() };
        self.processed += size;
        Some(batch)
    }
}

impl<O: Send + 'static> DataLoaderIterator<O> for RankIterator<O> {
    /// Returns the progress in items of this rank.
    fn progress(&self) -> Progress {
        Progress::new(self.processed, self.total, Some("items".into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(items: usize, rank: usize, world: usize, len: usize) -> Order {
        Order { items, rank, world, shuffle: Some(3), first: 0, len, train_len: len }
    }

    fn at(epoch: u64, items: usize) -> Position {
        Position { epoch, items, trains: false }
    }

    #[test]
    fn the_ranks_batches_together_are_the_epochs_order() {
        let whole = order(12, 0, 1, 12).of_epoch(at(5, 0));
        let ranks: Vec<_> = (0..3).map(|rank| order(12, rank, 3, 4).of_epoch(at(5, 0))).collect();
        let together: Vec<_> = (0..4).flat_map(|i| ranks.iter().map(move |own| own[i])).collect();
        assert_eq!(together, whole);
    }

    #[test]
    fn the_first_items_fill_up_the_last_ranks() {
        let whole = order(7, 0, 1, 7).of_epoch(at(0, 0));
        let last = order(7, 3, 4, 2).of_epoch(at(0, 0));
        assert_eq!(last, [whole[3], whole[0]]);
    }

    #[test]
    fn skipped_items_are_the_first_ones() {
        let all = order(12, 1, 2, 6).of_epoch(at(2, 0));
        assert_eq!(order(12, 1, 2, 6).of_epoch(at(2, 4)), all[4..]);
    }
}
