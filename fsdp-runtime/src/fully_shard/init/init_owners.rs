//! The assignment of parameters to the ranks that initialise them.
//!
//! Without a seed, rank 0 initialises all parameters. With a seed, the initial value of a parameter
//! does not depend on the rank that initialises it. So processes share the work: each initialises
//! some of the parameters, and earlier values are sent in the meantime.
//!
//! Only the first rank of a process takes part. Burn has one random generator for each process, so
//! further ranks of the process would only wait for it. A rank whose rayon pool has one thread
//! leaves its core to the communication thread and does not take part either, unless it is rank 0.

use std::collections::HashSet;
use std::sync::OnceLock;

use burn::module::Param;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::launch::Worker;
use crate::module::{FsdpModule, ParamIndex, ParamVisitor};
use crate::options::FsdpOptions;
use crate::param_group::plan::ModelPlan;

/// The ranks that initialise parameters.
pub(in crate::fully_shard) struct InitOwners {
    /// Each owner with the number of elements that it has been assigned.
    ranks: Vec<(usize, usize)>,
    /// Parameters that have no value on any rank. Rank 0 owns all others.
    lazy: HashSet<ParamIndex>,
}

impl InitOwners {
    /// Finds the owners of a module's parameters. Every rank calls it.
    pub(in crate::fully_shard) fn new<M: FsdpModule>(
        module: &M,
        plan: &ModelPlan,
        worker: &Worker,
        options: &FsdpOptions,
    ) -> Result<Self, Error> {
        let shares_work = options.seed.is_some()
            && options.sync_module_states
            && options.cpu_ram_efficient_loading;
        if !shares_work {
            return Ok(Self { ranks: vec![(0, 0)], lazy: HashSet::new() });
        }
        let own = RankInfo {
            process: process_id(),
            threads: rayon::current_num_threads(),
            lazy: lazy_params(module, plan),
        };
        let all = worker.exchange_as("all_gather", "the parameters to initialise", own)?;
        let first_of_process =
            |own: &RankInfo| all.iter().position(|other| other.process == own.process);
        let takes_part = |rank: &usize| {
            let info = &all[*rank];
            first_of_process(info) == Some(*rank) && (*rank == 0 || info.threads > 1)
        };
        let ranks = (0..all.len()).filter(takes_part).map(|rank| (rank, 0)).collect();
        let lazy_on_all =
            |number: usize| all.iter().all(|info| info.lazy.get(number) == Some(&true));
        let managed = plan.indices.iter().copied().flatten().enumerate();
        let lazy = managed.filter(|(number, _)| lazy_on_all(*number)).map(|(_, index)| index);
        Ok(Self { ranks, lazy: lazy.collect() })
    }

    /// Assigns a parameter of `numel` elements to a rank, and returns the rank.
    ///
    /// All ranks get the same answers, because all ask for the same parameters in the same order.
    pub(super) fn assign(&mut self, index: ParamIndex, numel: usize) -> usize {
        if !self.lazy.contains(&index) {
            return 0;
        }
        let least = self.ranks.iter_mut().min_by_key(|(_, assigned)| *assigned);
        let (rank, assigned) = least.expect("rank 0 is always an owner");
        *assigned += numel;
        *rank
    }
}

/// Returns, for each managed parameter, whether it has no value yet on this rank.
fn lazy_params<M: FsdpModule>(module: &M, plan: &ModelPlan) -> Vec<bool> {
    struct Lazy(Vec<bool>);
    impl ParamVisitor for Lazy {
        fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(!param.is_initialized());
        }
    }
    let mut lazy = Lazy(Vec::new());
    module.visit_params(&mut lazy);
    // Ranks may differ in their ignored parameters, which are left out.
    let all = plan.indices.iter().zip(lazy.0);
    all.filter_map(|(index, lazy)| index.map(|_| lazy)).collect()
}

/// The facts about one rank from which all ranks find the owners.
#[derive(Serialize, Deserialize)]
struct RankInfo {
    /// Random number that the ranks of one process share.
    process: u64,
    /// Number of threads of the rank's rayon pool.
    threads: usize,
    /// Whether each managed parameter has no value yet.
    lazy: Vec<bool>,
}

/// Returns a random number that identifies this process among the processes of a run.
fn process_id() -> u64 {
    static ID: OnceLock<u64> = OnceLock::new();
    *ID.get_or_init(|| {
        use std::hash::{BuildHasher, RandomState};
        RandomState::new().hash_one(std::process::id())
    })
}
