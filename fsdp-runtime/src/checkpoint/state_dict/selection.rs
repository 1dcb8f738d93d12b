//! The parameters that a state dict covers, on which all ranks agree.

use std::collections::{BTreeSet, HashSet};

use super::options::StateDictOptions;
use super::recipient::Recipient;
use crate::checkpoint::filter::FilteredParam;
use crate::checkpoint::ranks::Ranks;
use crate::checkpoint::sharded_model::ShardedModel;
use crate::error::{CheckpointError, Error};
use crate::module::ParamIndex;
use crate::param_group::Placement;

/// Name of the agreement in the errors of collectives.
const WHAT: &str = "the options of a state dict";

/// The parameters that a state dict covers.
#[derive(Debug)]
pub(super) struct Selection {
    selected: HashSet<ParamIndex>,
    /// Whether missing and unexpected keys are listed in the report, and no error.
    pub(super) lenient: bool,
}

impl Selection {
    /// Returns the selection of all parameters, strictly.
    pub(super) fn all(model: &dyn ShardedModel) -> Self {
        let mut selected = HashSet::new();
        model.for_each_param(&mut |param| _ = selected.insert(param.index));
        Self { selected, lenient: false }
    }

    /// Returns the selection of `options`, which must be equal on all ranks. Every rank calls it.
    /// `recipient` is the recipient or the provider of a full state, and must be equal too.
    ///
    /// # Errors
    ///
    /// On the ranks that found the error: [`CheckpointError::Filter`], and
    /// [`ShardError::InvalidOption`](crate::errors::ShardError::InvalidOption) for a recipient outside of
    /// this world. [`CheckpointError::RanksDiffer`] on every rank.
    pub(super) fn agreed(
        model: &dyn ShardedModel,
        ranks: &Ranks,
        options: &StateDictOptions,
        recipient: Option<Recipient>,
    ) -> Result<Self, Error> {
        let checked = match recipient {
            Some(recipient) => recipient.check(ranks.mesh.world).map_err(Error::from),
            None => Ok(()),
        };
        let selection = checked.and_then(|()| Self::of(model, options).map_err(Error::from));
        let selection = ranks.agree(WHAT, selection)?;
        let all = ranks.exchange(WHAT, selection.choice(model, recipient))?;
        for (rank, found) in ranks.mesh.world.ranks().zip(&all) {
            if let Some((expected, found)) = difference(&all[0], found) {
                return Err(CheckpointError::RanksDiffer { rank, expected, found }.into());
            }
        }
        Ok(selection)
    }

    /// Returns the selection of `options`.
    ///
    /// # Errors
    ///
    /// [`CheckpointError::Filter`] where the filter does not fit the model.
    fn of(model: &dyn ShardedModel, options: &StateDictOptions) -> Result<Self, CheckpointError> {
        let mut params = Vec::new();
        model.for_each_param(&mut |param| params.push((param.index, param.is_frozen())));
        let seen = |&(index, frozen): &(ParamIndex, bool)| {
            let path = model.spec(index).path.as_str();
            FilteredParam { path, key: path, frozen }
        };
        if let Err(mut reason) = options.filter.check(params.iter().map(seen)) {
            reason.push_str(&ties(model));
            return Err(CheckpointError::Filter { reason });
        }
        let selected = params.iter().filter(|param| options.filter.selects(&seen(param)));
        let selected = selected.map(|&(index, _)| index).collect();
        Ok(Self { selected, lenient: options.lenient })
    }

    /// Returns whether a parameter is selected.
    pub(super) fn contains(&self, index: ParamIndex) -> bool {
        self.selected.contains(&index)
    }

    /// Returns the selected parameters without those whose paths are in `missing`.
    pub(super) fn without(
        &self,
        model: &dyn ShardedModel,
        missing: &[String],
    ) -> HashSet<ParamIndex> {
        let missing: HashSet<&String> = missing.iter().collect();
        let is_present = |index: &ParamIndex| !missing.contains(&model.spec(*index).path);
        self.selected.iter().copied().filter(is_present).collect()
    }

    /// Returns what must be equal on all ranks.
    fn choice(&self, model: &dyn ShardedModel, recipient: Option<Recipient>) -> Choice {
        let manner = if self.lenient { "a lenient" } else { "a strict" };
        let of = match recipient {
            Some(Recipient::Only(rank)) => format!("full state of rank {rank}"),
            Some(Recipient::All) => "full state of all ranks".into(),
            None => "state of each rank's shards".into(),
        };
        let path = |index: &ParamIndex| model.spec(*index).path.clone();
        (format!("{manner} {of}"), self.selected.iter().map(path).collect())
    }
}

/// Kind of the state dict and strictness, as a text; and the selected paths.
type Choice = (String, BTreeSet<String>);

/// Describes the first difference of a rank's choice from that of rank 0: rank 0's, and the rank's.
fn difference(first: &Choice, other: &Choice) -> Option<(String, String)> {
    if first.0 != other.0 {
        return Some((first.0.clone(), other.0.clone()));
    }
    let path = first.1.symmetric_difference(&other.1).next()?;
    let describe = |paths: &BTreeSet<String>| match paths.contains(path) {
        true => format!("a filter that selects `{path}`"),
        false => format!("a filter that leaves out `{path}`"),
    };
    Some((describe(&first.1), describe(&other.1)))
}

/// Describes by which paths the tied parameters of a model go, if there are any.
fn ties(model: &dyn ShardedModel) -> String {
    let mut text = String::new();
    for unit in model.schedule().units() {
        for spec in &unit.params {
            if let Placement::TiedTo(owner) = spec.placement {
                let owner = &unit.params[owner].path;
                text.push_str(&format!("; `{}` is tied to `{owner}`: name that path", spec.path));
            }
        }
    }
    text
}
