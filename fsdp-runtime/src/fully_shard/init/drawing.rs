//! Which rank draws a parameter's initial value, and values on their way from it.
//!
//! Under a seed a value is the same whichever rank draws it, so that processes share the work: one draws
//! while others do, and while what was drawn before travels. Burn's generator is one a process, and
//! thread ranks would only wait for it: of those the first draws. A rank with one thread has none beside
//! the one that communicates; unless it is rank 0, it draws nothing.

use std::collections::{HashSet, VecDeque};
use std::sync::OnceLock;

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::backend::{ShardBackend, StoredTensor};
use crate::collectives::comm::Work;
use crate::error::{CollectiveError, Error};
use crate::launch::Worker;
use crate::module::ParamIndex;
use crate::module::{FsdpModule, ParamVisitor};
use crate::options::FsdpOptions;
use crate::param_group::plan::Plan;

/// Who draws what.
pub(crate) struct InitOwners {
    /// Ranks, with the elements each has been given so far.
    ranks: Vec<(usize, usize)>,
    /// The parameters that no rank has a value of yet.
    to_draw: HashSet<ParamIndex>,
}

impl InitOwners {
    /// Agreed on between the ranks; every rank calls it.
    pub(crate) fn agree<M: FsdpModule>(
        module: &M,
        plan: &Plan,
        worker: &Worker,
        options: &FsdpOptions,
    ) -> Result<Self, Error> {
        struct Lazy(Vec<bool>);
        impl ParamVisitor for Lazy {
            fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.push(!param.is_initialized());
            }
        }
        let shared = options.seed.is_some()
            && options.sync_module_states
            && options.cpu_ram_efficient_loading;
        if !shared {
            return Ok(Self { ranks: vec![(0, 0)], to_draw: HashSet::new() });
        }
        let mut lazy = Lazy(Vec::new());
        module.visit_params(&mut lazy);
        // An ignored parameter may be there on some ranks alone.
        let places = || plan.places.iter().copied();
        let lazy = places().zip(lazy.0).filter_map(|(place, lazy)| place.map(|_| lazy)).collect();
        let own = Own { process: process(), threads: rayon::current_num_threads(), lazy };
        let all = worker.exchange("all_gather", "what is to be drawn", own)?;
        let first = |own: &Own| all.iter().position(|other| other.process == own.process);
        let draws = |rank: &usize| {
            first(&all[*rank]) == Some(*rank) && (*rank == 0 || all[*rank].threads > 1)
        };
        let ranks = (0..all.len()).filter(draws);
        let on_all = |at: usize| all.iter().all(|own| own.lazy.get(at) == Some(&true));
        let to_draw = places().flatten().enumerate().filter(|(at, _)| on_all(*at));
        Ok(Self {
            ranks: ranks.map(|rank| (rank, 0)).collect(),
            to_draw: to_draw.map(|(_, place)| place).collect(),
        })
    }

    /// The rank whose value of the parameter is broadcast: the same on every rank, which ask for one
    /// parameter after the other.
    pub(super) fn root(&mut self, place: ParamIndex, numel: usize) -> usize {
        if !self.to_draw.contains(&place) {
            return 0;
        }
        let least = self.ranks.iter_mut().min_by_key(|(_, given)| *given);
        let (rank, given) = least.expect("a process has a first rank");
        *given += numel;
        *rank
    }
}

/// What a rank tells the others before any draws.
#[derive(Serialize, Deserialize)]
struct Own {
    process: u64,
    /// Of its rayon pool.
    threads: usize,
    /// Whether it has yet to draw each of the sharded parameters.
    lazy: Vec<bool>,
}

/// A number that another process hardly has.
fn process() -> u64 {
    static OWN: OnceLock<u64> = OnceLock::new();
    *OWN.get_or_init(|| {
        use std::hash::{BuildHasher, RandomState};
        RandomState::new().hash_one(std::process::id())
    })
}

/// Values on their way to the shards they become.
pub(super) type Values<B> = Vec<(ParamId, StoredTensor<B>)>;

/// What a broadcast has brought.
pub(super) struct Received<B: ShardBackend> {
    pub(super) place: Option<ParamIndex>,
    pub(super) values: Values<B>,
}

/// A broadcast under way.
pub(super) struct Broadcast<B: ShardBackend> {
    /// The parameter it is, unless it is several small ones.
    pub(super) place: Option<ParamIndex>,
    /// Elements of the whole that this rank holds until all have got it; 0 where another rank sends.
    pub(super) held: usize,
    /// What this rank keeps of it.
    pub(super) values: Work<Values<B>>,
}

/// Those that no one has waited for yet, in the order in which they come.
pub(super) struct Broadcasts<B: ShardBackend> {
    queue: VecDeque<Broadcast<B>>,
    /// Elements held, and how many there may be.
    held: usize,
    most: usize,
}

impl<B: ShardBackend> Broadcasts<B> {
    /// None yet. This rank may hold `most` elements for others, or one parameter.
    pub(super) fn new(most: usize) -> Self {
        Self { queue: VecDeque::new(), held: 0, most }
    }

    pub(super) fn push(&mut self, broadcast: Broadcast<B>) {
        self.held += broadcast.held;
        self.queue.push_back(broadcast);
    }

    /// Waits for the next one: for each in turn, or until there is room for so many elements more.
    pub(super) fn next(
        &mut self,
        room_for: Option<usize>,
    ) -> Option<Result<Received<B>, CollectiveError>> {
        let enough = room_for.is_some_and(|numel| self.held == 0 || self.held + numel <= self.most);
        if enough {
            return None;
        }
        let Broadcast { place, held, values } = self.queue.pop_front()?;
        let values = values.wait();
        self.held -= held;
        Some(values.map(|values| Received { place, values }))
    }
}
