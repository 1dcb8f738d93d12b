//! The full state of a sharded model, gathered parameter by parameter.

use std::collections::BTreeMap;

use burn::module::Param;
use burn::tensor::{Tensor, TensorData};

use crate::error::Error;
use crate::fully_shard::Fsdp;
use crate::mesh::Rank;
use crate::param::Sharded;
use crate::schedule::Engine;
use crate::unit::{FsdpModule, Walk};

/// Who gets the full state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recipient {
    /// One rank; the others take part and get an empty state.
    Only(Rank),
    /// Every rank.
    All,
}

/// Full parameters by module path. Tied parameters appear once, at the place that owns them.
pub type UnshardedState = BTreeMap<String, TensorData>;

impl<M: FsdpModule> Fsdp<M> {
    /// Gathers the full parameters for one rank or for all. Every rank calls it; those that do not
    /// receive hold one parameter more than their fragments at a time.
    ///
    /// # Errors
    ///
    /// [`CollectiveError`](crate::CollectiveError) when a rank does not come.
    pub fn unsharded_state(&self, recipient: Recipient) -> Result<UnshardedState, Error> {
        struct Gather<'a> {
            engine: &'a dyn Engine,
            keep: bool,
            state: Result<UnshardedState, Error>,
        }
        impl Walk for Gather<'_> {
            fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                let (Some(sharded), Ok(state)) = (Sharded::of(param), &mut self.state) else {
                    return;
                };
                let base = param.base().into_dispatch();
                match self.engine.full(sharded.place, base, self.keep) {
                    Ok(Some(data)) => {
                        let place = sharded.place;
                        let path = &self.engine.units()[place.unit].entries[place.entry].path;
                        state.insert(path.clone(), data);
                    }
                    Ok(None) => {}
                    Err(error) => self.state = Err(error),
                }
            }
        }
        let keep = match recipient {
            Recipient::Only(rank) => rank == self.mesh().rank,
            Recipient::All => true,
        };
        let mut gather = Gather { engine: &*self.engine, keep, state: Ok(UnshardedState::new()) };
        self.module.walk(&mut gather);
        gather.state
    }
}
