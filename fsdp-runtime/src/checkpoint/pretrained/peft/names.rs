//! The names by which PEFT finds modules again.

use std::collections::BTreeSet;

/// First segments of every tensor's name: PEFT's model, and its wrapper of the base model.
const PREFIX: &str = "base_model.model";

/// Returns the name of a tensor in PEFT's file, given its name in the base model.
pub(super) fn tensor_name(key: &str) -> String {
    format!("{PREFIX}.{key}")
}

/// Returns the key of the module that a parameter is in.
pub(super) fn module_of(key: &str) -> &str {
    key.rsplit_once('.').map_or("", |(module, _)| module)
}

/// Returns the keys of all modules, inner and outer, that have one of the parameters.
pub(super) fn modules<'a>(params: impl Iterator<Item = &'a str>) -> BTreeSet<&'a str> {
    let mut modules = BTreeSet::new();
    for param in params {
        let mut module = module_of(param);
        while !module.is_empty() {
            modules.insert(module);
            module = module_of(module);
        }
    }
    modules
}

/// Returns target modules that match exactly the `adapted` ones among `modules`. PEFT compares
/// whole segments at the end of a module's key, so the shortest end that no other module has will
/// do.
pub(super) fn target_modules(adapted: &BTreeSet<&str>, modules: &BTreeSet<&str>) -> Vec<String> {
    let mut targets = BTreeSet::new();
    for key in adapted {
        let starts = key.rmatch_indices('.').map(|(index, _)| index + 1).chain([0]);
        let mut ends = starts.map(|start| &key[start..]);
        let only_adapted = |end: &&str| {
            let matches = |module: &&&str| {
                module
                    .strip_suffix(*end)
                    .is_some_and(|start| start.is_empty() || start.ends_with('.'))
            };
            modules.iter().filter(matches).all(|module| adapted.contains(module))
        };
        targets.insert(ends.find(only_adapted).unwrap_or(key).to_string());
    }
    targets.into_iter().collect()
}

/// Returns the outermost modules all of whose parameters are trained, and for a trained parameter
/// in no such module the module that it is in. `params` are keys, each with whether it is trained.
pub(super) fn modules_to_save(params: &[(&str, bool)]) -> Vec<String> {
    let within = |param: &str, module: &str| {
        param.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
    };
    let mut saved = BTreeSet::new();
    for (param, _) in params.iter().filter(|(_, trained)| *trained) {
        let mut ends = param.match_indices('.').map(|(index, _)| &param[..index]);
        let full = |module: &&str| {
            params.iter().all(|(other, trained)| *trained || !within(other, module))
        };
        saved.insert(ends.find(full).unwrap_or(module_of(param)).to_string());
    }
    saved.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_the_shortest_ends_that_match_nothing_else() {
        let params = [
            "bert.layer.0.attention.query.weight",
            "bert.layer.0.attention.output.dense.weight",
            "bert.layer.0.output.dense.weight",
            "bert.layer.1.attention.query.weight",
            "bert.layer.1.attention.output.dense.weight",
            "bert.layer.1.output.dense.weight",
            "query_norm.weight",
        ];
        let modules = modules(params.into_iter());
        let targets =
            |adapted: &[&'static str]| target_modules(&adapted.iter().copied().collect(), &modules);
        let queries = ["bert.layer.0.attention.query", "bert.layer.1.attention.query"];
        assert_eq!(targets(&queries), ["query"]);
        assert_eq!(targets(&queries[1..]), ["1.attention.query"]);
        let dense = ["bert.layer.0.output.dense", "bert.layer.1.output.dense"];
        assert_eq!(targets(&dense), ["0.output.dense", "1.output.dense"]);
        let attention =
            ["bert.layer.0.attention.output.dense", "bert.layer.1.attention.output.dense"];
        assert_eq!(targets(&attention), ["attention.output.dense"]);
        assert_eq!(targets(&["query_norm"]), ["query_norm"]);
    }

    #[test]
    fn saved_modules_are_the_outermost_that_are_trained_in_full() {
        let params = [
            ("bert.layer.0.weight", false),
            ("bert.layer.0.bias", true),
            ("head.dense.weight", true),
            ("head.dense.bias", true),
            ("head.out.weight", true),
        ];
        assert_eq!(modules_to_save(&params), ["bert.layer.0", "head"]);
        assert!(modules_to_save(&params[..1]).is_empty());
    }
}
