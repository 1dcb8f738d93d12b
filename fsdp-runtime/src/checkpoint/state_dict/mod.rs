//! State dicts in memory: what a rank holds, as three types that cannot be mixed up.
//!
//! [`ShardedState`] is this rank's elements of the full tensors; [`LocalState`] is what the rank
//! holds as it lies, for the same layout alone; [`FullState`] is the full tensors. Each comes for
//! models, by module path, and for optimizers ([`OptimizerState`](crate::OptimizerState)).
//! For files, and between world sizes, there is [`checkpoint`](crate::checkpoint).

mod optimizer;

use std::collections::{BTreeMap, HashMap};
use std::ops::{Deref, Range};

use burn::tensor::{DType, DispatchTensor, TensorData};

pub use self::optimizer::{LocalTensor, OptimizerState, ParameterState};
use crate::checkpoint::model::{self, Holding, Model};
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::{State, StateMut};
use crate::error::CheckpointError;
use crate::error::{Error, ShardError};
use crate::fully_shard::Fsdp;
use crate::layout::{Rank, WorldSize};
use crate::module::FsdpModule;
use crate::module::ParamIndex;
use crate::param_group::{ParamSpec, Placement};

/// Who gets, or gives, the full state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipient {
    /// One rank; the others take part and have an empty state.
    Only(Rank),
    /// Every rank.
    All,
}

impl Recipient {
    pub(crate) fn is(self, rank: Rank) -> bool {
        self == Self::All || self == Self::Only(rank)
    }

    /// That it is a rank of this world.
    pub(crate) fn check(self, world: WorldSize) -> Result<(), ShardError> {
        match self {
            Self::Only(rank) if rank.index() >= world.size() => Err(ShardError::InvalidOption {
                option: "Recipient::Only",
                value: rank.to_string(),
                expected: format!("use a rank of this world of {world}"),
            }),
            _ => Ok(()),
        }
    }
}

/// Full tensors by module path. Tied parameters appear once, at the place that owns them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FullState(BTreeMap<String, TensorData>);

/// A rank's elements of the full tensors, by module path.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ShardedState(BTreeMap<String, ShardedTensor>);

/// What a rank holds, as it lies: shards keep the shape they have between steps. It can be
/// loaded at the same world size, rank, strategy and wrapping only.
#[derive(Clone, Debug, PartialEq)]
pub struct LocalState {
    layout: Layout,
    tensors: BTreeMap<String, TensorData>,
}

/// A rank's elements of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardedTensor {
    /// The full shape.
    pub shape: Vec<usize>,
    /// The elements held, of the flattened full tensor.
    pub range: Range<usize>,
    /// Their values, of shape `[range.len()]`.
    pub data: TensorData,
}

/// Who holds which elements: what a local state is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    rank: usize,
    world: usize,
    held: Vec<(String, Vec<usize>, Range<usize>)>,
}

impl Deref for FullState {
    type Target = BTreeMap<String, TensorData>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Deref for ShardedState {
    type Target = BTreeMap<String, ShardedTensor>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl<'a> IntoIterator for &'a FullState {
    type Item = (&'a String, &'a TensorData);
    type IntoIter = std::collections::btree_map::Iter<'a, String, TensorData>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl IntoIterator for FullState {
    type Item = (String, TensorData);
    type IntoIter = std::collections::btree_map::IntoIter<String, TensorData>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl FromIterator<(String, TensorData)> for FullState {
    fn from_iter<I: IntoIterator<Item = (String, TensorData)>>(tensors: I) -> Self {
        Self(tensors.into_iter().collect())
    }
}

impl LocalState {
    /// The tensors by module path.
    pub fn tensors(&self) -> &BTreeMap<String, TensorData> {
        &self.tensors
    }
}

impl<M: FsdpModule> State<'_, M> {
    /// The elements this rank holds of every parameter.
    pub fn sharded(&self) -> ShardedState {
        let mut state = BTreeMap::new();
        self.model.visit_bytes(&mut |entry, dtype, bytes| {
            let range = entry.range();
            let data = tensor_data(&bytes[..range.len() * dtype.size()], vec![range.len()], dtype);
            let shape = entry.shape.clone();
            state.insert(entry.path.clone(), ShardedTensor { shape, range, data });
        });
        ShardedState(state)
    }

    /// What this rank holds of every parameter, as it lies.
    pub fn local(&self) -> LocalState {
        let mut tensors = BTreeMap::new();
        self.model.visit_bytes(&mut |entry, dtype, bytes| {
            tensors.insert(entry.path.clone(), tensor_data(bytes, entry.base_shape(), dtype));
        });
        LocalState { layout: self.model.layout(), tensors }
    }

    /// Gathers the full parameters for one rank or for all. Every rank calls it; those that do not
    /// receive hold one parameter more than their shards at a time. Of an ignored parameter
    /// and of a running statistic, which each rank has for itself, rank 0's is the one.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::CollectiveError) when a rank does not come, and
    /// [`ShardError::InvalidOption`] for a recipient that is no rank of this world.
    pub fn full(&self, recipient: Recipient) -> Result<FullState, Error> {
        recipient.check(self.model.mesh().world)?;
        let keep = recipient.is(self.model.mesh().rank);
        let (mut state, mut outcome) = (BTreeMap::new(), Ok(()));
        self.model.visit(&mut |Holding { place, base, .. }| {
            if outcome.is_err() {
                return;
            }
            let entry = self.model.entry(place);
            let full = match entry.held {
                Placement::PerRank => self.model.rank_zeros(entry, base, keep),
                _ => self.model.engine.full(place, base, keep),
            };
            match full {
                Ok(Some(data)) => _ = state.insert(entry.path.clone(), data),
                Ok(None) => {}
                Err(error) => outcome = Err(error),
            }
        });
        outcome.map(|()| FullState(state))
    }
}

impl<M: FsdpModule> StateMut<'_, M> {
    /// Loads this rank's elements.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with everything that differs; the model is unchanged.
    pub fn load_sharded(&mut self, state: &ShardedState) -> Result<(), CheckpointError> {
        let compare = |entry: &ParamSpec, dtype: DType, tensor: &ShardedTensor| {
            different("shape", &tensor.shape, &entry.shape)
                .or_else(|| different("elements", &tensor.range, &entry.range()))
                .or_else(|| {
                    let len = vec![tensor.range.len()];
                    different("data", &tensor.data.shape().as_slice().to_vec(), &len)
                })
                .or_else(|| different("dtype", &tensor.data.dtype(), &dtype))
        };
        self.model.compare(state.keys(), |entry, dtype| {
            Some(compare(entry, dtype, state.get(&entry.path)?))
        })?;
        self.model.fill(&mut |_, entry, dtype| {
            Some(tensor_data(state.get(&entry.path)?.data.as_bytes(), entry.base_shape(), dtype))
        });
        Ok(())
    }

    /// Loads what this rank held.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] where the layout is another one; the model is unchanged.
    pub fn load_local(&mut self, state: &LocalState) -> Result<(), CheckpointError> {
        same_layout(&state.layout, &self.model.layout())?;
        self.model.fill(&mut |_, entry, _| state.tensors.get(&entry.path).cloned());
        Ok(())
    }

    /// Loads full parameters, given by one rank or by all; a rank that does not give passes an
    /// empty state. Every rank calls it, and holds one parameter more at a time.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::StateMismatch`] with everything that differs, on every rank that gives,
    /// and [`CollectiveError`](crate::CollectiveError) on the others; the model is unchanged.
    pub fn load_full(&mut self, state: &FullState, from: Recipient) -> Result<(), Error> {
        from.check(self.model.mesh().world)?;
        let ranks = Ranks::from(&*self.model);
        let gives = from.is(self.model.mesh().rank);
        let compare = |entry: &ParamSpec, dtype: DType, data: &TensorData| {
            different("shape", &data.shape().as_slice().to_vec(), &entry.shape)
                .or_else(|| different("dtype", &data.dtype(), &dtype))
        };
        let compared = match gives {
            true => self.model.compare(state.keys(), |entry, dtype| {
                Some(compare(entry, dtype, state.get(&entry.path)?))
            }),
            false => Ok(()),
        };
        ranks.settle("a full state", compared)?;
        let mut places = Vec::new();
        self.model.visit(&mut |held| places.push(held.place));
        let mut slices: HashMap<ParamIndex, TensorData> = HashMap::new();
        for place in places {
            let entry = self.model.entry(place);
            let mut keep = |data: &TensorData| {
                if !entry.range().is_empty() {
                    let size = data.dtype().size();
                    let bytes = entry.range().start * size..entry.range().end * size;
                    let bytes = &data.as_bytes()[bytes];
                    slices.insert(place, tensor_data(bytes, entry.base_shape(), data.dtype()));
                }
            };
            let own = state.get(&entry.path).filter(|_| gives);
            match from {
                Recipient::All => own.into_iter().for_each(keep),
                Recipient::Only(giver) => {
                    let what = format!("`{}` of a full state", entry.path);
                    let all = ranks.exchange(&what, own.cloned())?;
                    all[giver.index()].iter().for_each(&mut keep);
                }
            }
        }
        self.model.fill(&mut |place, _, _| slices.remove(&place));
        Ok(())
    }
}

impl<M: FsdpModule> Fsdp<M> {
    /// Rank 0's values of an ignored parameter, for who keeps them.
    fn rank_zeros(
        &self,
        entry: &ParamSpec,
        base: DispatchTensor,
        keep: bool,
    ) -> Result<Option<TensorData>, Error> {
        let ranks = Ranks::from(self);
        let what = format!("`{}` of a full state", entry.path);
        let own = ranks.leads().then(|| reshaped(model::own(base), entry.shape.clone()));
        let all = ranks.exchange(&what, own)?;
        Ok((*all[0]).clone().filter(|_| keep))
    }

    pub(crate) fn entry(&self, place: ParamIndex) -> &ParamSpec {
        model::entry(&*self.engine, &self.ignored, place)
    }

    fn visit_bytes(&self, f: &mut dyn FnMut(&ParamSpec, DType, &[u8])) {
        self.visit(&mut |held| {
            let (entry, dtype) = (self.entry(held.place), held.dtype);
            model::with_bytes(&*self.engine, entry, held.base, &mut |bytes| {
                f(entry, dtype, bytes);
            });
        });
    }

    pub(crate) fn layout(&self) -> Layout {
        let entries = self.engine.units().iter().flat_map(|unit| &unit.entries);
        let entries = entries.chain(self.ignored.iter().map(|ignored| &ignored.entry));
        let held = entries.map(|entry| (entry.path.clone(), entry.shape.clone(), entry.range()));
        let mesh = self.mesh();
        Layout { rank: mesh.rank.index(), world: mesh.world.size(), held: held.collect() }
    }

    /// All differences between names and the model, where `compare` tells those of one: `None` for
    /// a name that is missing.
    fn compare<'a>(
        &self,
        names: impl Iterator<Item = &'a String>,
        compare: impl Fn(&ParamSpec, DType) -> Option<Option<String>>,
    ) -> Result<(), CheckpointError> {
        let mut differences = Vec::new();
        let mut known = Vec::new();
        self.visit(&mut |held| {
            let entry = self.entry(held.place);
            known.push(entry.path.as_str());
            match compare(entry, held.dtype) {
                None => differences.push(format!("missing: `{}`", entry.path)),
                Some(Some(difference)) => {
                    differences.push(format!("`{}`: {difference}", entry.path))
                }
                Some(None) => {}
            }
        });
        let unexpected = names.filter(|name| !known.contains(&name.as_str()));
        differences.extend(unexpected.map(|name| format!("unexpected: `{name}`")));
        if differences.is_empty() {
            return Ok(());
        }
        Err(CheckpointError::StateMismatch { differences })
    }
}

/// What differs between two of a kind, if anything.
pub(crate) fn different<T: PartialEq + std::fmt::Debug>(
    what: &str,
    found: &T,
    expected: &T,
) -> Option<String> {
    (found != expected).then(|| format!("{what} {found:?} in the state, {expected:?} in the model"))
}

/// Checks that a local state was taken in this layout.
pub(crate) fn same_layout(found: &Layout, expected: &Layout) -> Result<(), CheckpointError> {
    let mut differences: Vec<String> = different("world size", &found.world, &expected.world)
        .into_iter()
        .chain(different("rank", &found.rank, &expected.rank))
        .collect();
    for at in 0..found.held.len().max(expected.held.len()) {
        differences.extend(different("parameter", &found.held.get(at), &expected.held.get(at)));
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(CheckpointError::StateMismatch { differences })
}

/// The same elements in another shape.
pub(crate) fn reshaped(data: TensorData, shape: Vec<usize>) -> TensorData {
    let (bytes, _, dtype) = data.into_parts();
    TensorData::from_bytes(bytes, shape, dtype)
}

/// A copy of a tensor's bytes.
pub(crate) fn tensor_data(bytes: &[u8], shape: Vec<usize>, dtype: DType) -> TensorData {
    if dtype == DType::F32 {
        // Aligned as f32, so that a tensor keeps this very memory.
        let mut elements = vec![0f32; bytes.len() / size_of::<f32>()];
        bytemuck::cast_slice_mut(&mut elements).copy_from_slice(bytes);
        return TensorData::new(elements, shape);
    }
    TensorData::from_bytes_vec(bytes.to_vec(), shape, dtype)
}
