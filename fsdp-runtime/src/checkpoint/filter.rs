//! Selection of the parameters that a load or save of weights, or a state dict, covers.

use std::collections::BTreeSet;

/// Selection of a model's parameters, for loads and saves of weights and for state dicts.
/// Conditions add up: a parameter is selected that meets all of them.
///
/// ```
/// use fsdp_runtime::pretrained::SavePretrained;
/// use fsdp_runtime::state::ParamFilter;
///
/// // The encoder without its frozen parameters.
/// let filter = ParamFilter::new().with_trainable_only().with_submodule("encoder");
/// let options = SavePretrained::new().with_filter(filter);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct ParamFilter {
    trainable: bool,
    adapters: bool,
    within: Vec<String>,
    outside: Vec<String>,
}

impl ParamFilter {
    /// Returns a filter that selects all parameters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Leaves out frozen parameters: those that require no gradient. Running statistics, which are
    /// no parameters, stay. PyTorch's `StateDictOptions(ignore_frozen_params=True)`.
    pub fn with_trainable_only(mut self) -> Self {
        self.trainable = true;
        self
    }

    /// Selects the factors of LoRA adapters only.
    pub fn with_adapters_only(mut self) -> Self {
        self.adapters = true;
        self
    }

    /// Selects the parameters of the submodule at a module path, such as `encoder.layers.0`. Several
    /// calls select the parameters of all these submodules.
    pub fn with_submodule(mut self, path: impl Into<String>) -> Self {
        self.within.push(path.into());
        self
    }

    /// Leaves out the parameters of the submodule at a module path.
    pub fn without_submodule(mut self, path: impl Into<String>) -> Self {
        self.outside.push(path.into());
        self
    }

    /// Returns whether the filter depends on which parameters are frozen.
    pub(super) fn is_of_trainable(&self) -> bool {
        self.trainable
    }

    /// Returns whether the filter selects a parameter.
    pub(super) fn selects(&self, param: &FilteredParam<'_>) -> bool {
        let lies_in = |path: &String| is_within(param.path, path);
        (!self.trainable || !param.frozen)
            && (!self.adapters || is_factor(param.key))
            && (self.within.is_empty() || self.within.iter().any(lies_in))
            && !self.outside.iter().any(lies_in)
    }

    /// Checks that each submodule has a parameter, and that a parameter is selected.
    ///
    /// # Errors
    ///
    /// A description of the fault.
    pub(super) fn check<'a>(
        &self,
        params: impl Iterator<Item = FilteredParam<'a>>,
    ) -> Result<(), String> {
        if *self == Self::default() {
            return Ok(());
        }
        let params: Vec<_> = params.collect();
        for path in self.within.iter().chain(&self.outside) {
            if !params.iter().any(|param| is_within(param.path, path)) {
                let near = nearest_paths(path, &params).join("`, `");
                return Err(format!(
                    "the model has no parameter in a submodule `{path}`; the nearest paths are \
                     `{near}`"
                ));
            }
        }
        if params.iter().any(|param| self.selects(param)) {
            return Ok(());
        }
        let count = |is: fn(&FilteredParam<'_>) -> bool| params.iter().filter(|it| is(it)).count();
        Err(format!(
            "it selects no parameter of the model; of {} parameters, {} are frozen and {} are \
             factors of adapters",
            params.len(),
            count(|param| param.frozen),
            count(|param| is_factor(param.key))
        ))
    }
}

/// A parameter as a filter sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct FilteredParam<'a> {
    /// Module path.
    pub(super) path: &'a str,
    /// Name in a file.
    pub(super) key: &'a str,
    pub(super) frozen: bool,
}

/// Returns the three paths of parameters and submodules that are nearest to `path`, the nearest one
/// first.
fn nearest_paths<'a>(path: &str, params: &[FilteredParam<'a>]) -> Vec<&'a str> {
    let mut paths = BTreeSet::new();
    for &FilteredParam { path, .. } in params {
        paths.extend(path.match_indices('.').map(move |(end, _)| &path[..end]));
        paths.insert(path);
    }
    let mut paths: Vec<&str> = paths.into_iter().collect();
    paths.sort_by_cached_key(|known| strsim::damerau_levenshtein(path, known));
    paths.truncate(3);
    paths
}

/// Returns whether a parameter's path is that of a module, or lies in it.
fn is_within(param: &str, module: &str) -> bool {
    param.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns whether a key is that of a factor of a LoRA adapter.
pub(super) fn is_factor(key: &str) -> bool {
    [".lora.a", ".lora.b"].iter().any(|end| key.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_add_up_and_paths_are_whole_segments() {
        fn param(path: &str, frozen: bool) -> FilteredParam<'_> {
            FilteredParam { path, key: path, frozen }
        }
        let names = ["a.0.w", "a.0.w.lora.a", "a.01.w", "b.w"];
        let selected = |filter: &ParamFilter| {
            let selects = |name: &&str| filter.selects(&param(name, !name.contains("lora")));
            names.iter().copied().filter(selects).collect::<Vec<_>>()
        };
        assert_eq!(selected(&ParamFilter::new()), names);
        assert_eq!(selected(&ParamFilter::new().with_submodule("a.0")), names[..2]);
        assert_eq!(selected(&ParamFilter::new().without_submodule("a.0")), names[2..]);
        let two = ParamFilter::new().with_submodule("a").with_submodule("b");
        assert_eq!(selected(&two), names);
        assert_eq!(selected(&two.clone().with_adapters_only()), names[1..2]);
        assert_eq!(selected(&two.without_submodule("a.0").with_trainable_only()), [""; 0]);

        let check = |filter: ParamFilter| filter.check(names.iter().map(|name| param(name, true)));
        assert_eq!(check(ParamFilter::new().with_submodule("a.01.w")), Ok(()));
        let missing = check(ParamFilter::new().without_submodule("a.")).unwrap_err();
        assert!(missing.contains("submodule `a.`; the nearest paths are `a`, "), "{missing}");
        let missing = check(ParamFilter::new().with_submodule("a.02")).unwrap_err();
        assert!(missing.contains("the nearest paths are `a.0`, `a.01`, "), "{missing}");
        let none = check(ParamFilter::new().with_trainable_only()).unwrap_err();
        assert!(
            none.contains("no parameter of the model; of 4 parameters, 4 are frozen"),
            "{none}"
        );
    }
}
