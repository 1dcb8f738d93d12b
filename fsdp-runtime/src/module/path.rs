//! Module paths and parameter ids, for visitors and mappers that need them.

use std::collections::HashMap;

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;

use super::contract::{FsdpModule, ParamVisitor};
use super::node::{Child, Split};
use super::param::Sharded;
use super::runtime::ParamIndex;

/// The module path of the field that a traversal is in.
///
/// A `ParamVisitor` or `ParamMapper` calls [`enter`](Self::enter) and [`exit`](Self::exit) in its
/// methods of the same names. A visitor of Burn's own calls [`push`](Self::push) instead of
/// `enter`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModulePath {
    segments: Vec<String>,
    /// How each field, or the one around it, is split over tensor parallel ranks.
    splits: Vec<Option<Split>>,
}

impl ModulePath {
    /// Appends the segment of a field, or of a list's element.
    pub(crate) fn enter(&mut self, child: &Child, index: Option<usize>) {
        let segment = index.map_or_else(|| child.name.to_string(), |index| index.to_string());
        self.splits.push(child.split.or(self.split()));
        self.segments.push(segment);
    }

    /// Appends a segment to the path.
    pub(crate) fn push(&mut self, segment: &str) {
        self.splits.push(self.split());
        self.segments.push(segment.to_string());
    }

    /// Removes the last segment.
    pub(crate) fn exit(&mut self) {
        self.segments.pop();
        self.splits.pop();
    }

    /// Returns the segments, outermost first.
    pub(crate) fn segments(&self) -> &[String] {
        &self.segments
    }

    /// Returns how the field, or the one around it, is split over tensor parallel ranks.
    pub(crate) fn split(&self) -> Option<Split> {
        self.splits.last().copied().flatten()
    }

    /// Returns the dotted path with the segments `below` appended.
    pub(crate) fn join(&self, below: &[String]) -> String {
        let segments: Vec<&str> = self.segments.iter().chain(below).map(String::as_str).collect();
        segments.join(".")
    }
}

/// Returns the id of each sharded or replicated parameter by its index. A tied parameter has an
/// entry at each of the indices that share the values. Parameters under `ignored_params` and
/// running statistics have no index and are left out.
pub(crate) fn param_ids<M: FsdpModule>(module: &M) -> HashMap<ParamIndex, ParamId> {
    struct Ids(HashMap<ParamIndex, ParamId>);
    impl ParamVisitor for Ids {
        fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(sharded) = Sharded::of(param) {
                self.0.insert(sharded.index, param.id);
            }
        }
    }
    let mut ids = Ids(HashMap::new());
    module.visit_params(&mut ids);
    ids.0
}

#[cfg(test)]
mod tests {
    use super::super::node::LEAF;
    use super::*;

    #[test]
    fn a_path_has_field_names_and_list_indices() {
        let mut path = ModulePath::default();
        path.enter(&Child::plain("layers", &LEAF), None);
        path.enter(&Child::plain("", &LEAF), Some(3));
        path.push("up");
        assert_eq!(path.join(&["weight".to_string()]), "layers.3.up.weight");
        path.exit();
        assert_eq!(path.segments(), ["layers", "3"]);
    }
}
