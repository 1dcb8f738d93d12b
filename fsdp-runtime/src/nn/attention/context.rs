//! Attention among context parallel ranks, each of which has a part of every row.

use std::sync::Arc;

use burn::tensor::Tensor;

use crate::backend::ops::{AttentionRule, KeyRanges, Segments, WeightPlaces};
use crate::error::raise;
use crate::layout::ContextPart;
use crate::module::{RunningForward, Runtime};

/// The context parallel ranks of the model whose forward runs, and this rank's parts.
pub(super) struct Context {
    runtime: Arc<dyn Runtime>,
    queries: ContextPart,
    keys: ContextPart,
}

impl Context {
    /// Returns the context parallel ranks of the model whose forward runs on this thread, if there are some, for
    /// parts of these numbers of queries and keys. Unwinds with the error if no part has as many, or if the queries
    /// are a part of the sequence under sequence parallel.
    pub(super) fn current([queries, keys]: [usize; 2]) -> Option<Self> {
        let checked = RunningForward::current()?.check_positions(queries);
        checked.unwrap_or_else(|error| raise(error));
        let ((queries, runtime), (keys, _)) =
            (RunningForward::part(queries)?, RunningForward::part(keys)?);
        Some(Self { runtime, queries, keys })
    }

    /// Returns the numbers of queries and keys of whole rows.
    pub(super) fn lengths(&self) -> [usize; 2] {
        [self.queries, self.keys].map(|part| part.length())
    }

    /// Computes attention of this rank's queries with the keys of all ranks. `bias` and `rule` are those of
    /// whole rows.
    pub(super) fn attention(
        &self,
        tensors: [Tensor<4>; 3],
        bias: Option<Tensor<2>>,
        rule: &AttentionRule,
    ) -> Tensor<4> {
        let rule = self.own_rule(rule, tensors[0].dims()[0]);
        let tensors = tensors.map(Tensor::into_dispatch);
        let bias = bias.map(Tensor::into_dispatch);
        let output = self.runtime.attend_in_context(tensors, bias, &rule);
        Tensor::from_dispatch(output.unwrap_or_else(|error| raise(error)))
    }

    /// Returns the rule for this rank's queries: the range of keys that each of them sees, if the rule hides
    /// some.
    fn own_rule(&self, rule: &AttentionRule, batch: usize) -> AttentionRule {
        let whole = KeyRanges::new(rule, self.lengths());
        let of_query = |row: usize, query: usize| {
            let seen = whole.of_query(row, query);
            [seen.start as u32, seen.end as u32]
        };
        let segments = rule.hides().then(|| {
            let queries = self.queries;
            let of_row = |row: usize| queries.indices().map(move |query| of_query(row, query));
            Segments::of_ranges((0..batch).flat_map(of_row).collect(), queries.len())
        });
        let queries = self.queries.places();
        let places = rule.places.map(|places| WeightPlaces { queries, ..places });
        AttentionRule { causal: false, window: None, segments, places, ..rule.clone() }
    }
}
