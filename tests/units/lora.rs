//! Which linear layers `LoraConfig` gives adapters.

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Device, Int, Tensor};
use fsdp_runtime::errors::LoraError;
use fsdp_runtime::lora::LoraConfig;
use fsdp_runtime::prelude::*;

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Attention {
    #[fsdp(key = "self.query")]
    query: Linear,
    value: Linear,
}

#[fsdp_unit]
impl Attention {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.value.forward(self.query.forward(x))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    attention: Attention,
    value: Option<Linear>,
}

#[fsdp_unit]
impl Block {
    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.attention.forward(x);
        self.value.as_ref().map_or(x.clone(), |value| value.forward(x))
    }
}

#[derive(Module, Debug)]
#[fsdp_unit(root, tie("embed" = "head"))]
pub struct Net {
    embed: Embedding,
    layers: Vec<Block>,
    head: Linear,
    classifier: Linear,
}

#[fsdp_unit]
impl Net {
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<2> {
        let x = self.embed.forward(tokens).mean_dim(1).squeeze_dim(1);
        let x = self.layers.iter().fold(x, |x, layer| layer.forward(x));
        self.classifier.forward(self.head.forward(x))
    }
}

fn net() -> Net {
    let device = Device::flex().autodiff();
    let linear = || LinearConfig::new(8, 8).init(&device);
    let block = || Block {
        attention: Attention { query: linear(), value: linear() },
        value: Some(linear()),
    };
    let embed = EmbeddingConfig::new(5, 8).init(&device);
    Net { embed, layers: vec![block(), block()], head: linear(), classifier: linear() }
}

/// Returns the paths of the parameters that require a gradient.
fn trained(net: &Net) -> Vec<String> {
    struct Trained(Vec<String>, Vec<String>);
    impl ModuleVisitor for Trained {
        fn enter_module(&mut self, name: &str, _: &str) {
            self.0.push(name.to_string());
        }

        fn exit_module(&mut self, _: &str, _: &str) {
            self.0.pop();
        }

        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.base().is_require_grad() {
                self.1.push(self.0.join("."));
            }
        }
    }
    let mut trained = Trained(Vec::new(), Vec::new());
    net.visit(&mut trained);
    trained.1
}

/// Returns the layers with adapters.
fn adapted(lora: LoraConfig) -> Vec<String> {
    let paths = trained(&lora.apply(net()).unwrap()).into_iter();
    paths.filter_map(|path| path.strip_suffix(".weight.lora.a").map(str::to_string)).collect()
}

#[test]
fn names_and_unit_types_choose_the_layers() {
    let lora = || LoraConfig::new(2);
    let both = |name: &str| [0, 1].map(|index| format!("layers.{index}.{name}"));
    assert_eq!(adapted(lora().with_target_modules(["query"])), both("attention.query"));
    // A checkpoint key.
    assert_eq!(adapted(lora().with_target_modules(["self.query"])), both("attention.query"));
    assert_eq!(adapted(lora().with_target_modules(["attention.value"])), both("attention.value"));
    assert_eq!(adapted(lora().with_target_modules(["value"])).len(), 4);
    assert_eq!(adapted(lora().with_target_modules(["1.value"])), ["layers.1.value"]);
    let inner = lora().with_target_units(unit_types![Attention]);
    assert_eq!(adapted(inner.clone()).len(), 4);
    assert_eq!(adapted(inner.with_target_modules(["value"])), both("attention.value"));
    assert_eq!(adapted(lora().with_target_units(unit_types![Block])).len(), 6);
    // Every linear layer but the tied and the saved one.
    assert_eq!(adapted(lora()).len(), 7);
    assert_eq!(adapted(lora().with_modules_to_save(["classifier"])).len(), 6);
}

#[test]
fn patterns_and_numbers_of_blocks_choose_the_layers() {
    let lora = || LoraConfig::new(2);
    // A whole path, or a whole checkpoint key.
    let pattern = r"layers\.\d\.attention\.(self\.)?query|.*\.1\.value";
    let expected = ["layers.0.attention.query", "layers.1.attention.query", "layers.1.value"];
    assert_eq!(adapted(lora().with_target_pattern(pattern)), expected);
    let names = lora().with_target_pattern(pattern).with_target_modules(["query"]);
    assert_eq!(adapted(names), expected[..2]);
    let first = lora().with_target_modules(["value"]).with_layers_to_transform([0]);
    assert_eq!(adapted(first.clone()), ["layers.0.attention.value", "layers.0.value"]);
    assert_eq!(adapted(first.with_layers_pattern(["layers"])).len(), 2);

    let error = lora().with_target_pattern("quer").apply(net()).unwrap_err();
    assert!(error.to_string().contains("no linear layer matches `quer`"), "{error}");
    for (config, found) in [
        (lora().with_layers_to_transform([1, 2]), vec![0, 1]),
        (lora().with_layers_to_transform([2]).with_layers_pattern(["h"]), vec![]),
    ] {
        let error = config.apply(net()).unwrap_err();
        assert_eq!(error, LoraError::LayersToTransform { missing: vec![2], found });
    }
}

#[test]
fn the_base_is_frozen_and_modules_to_save_are_trained() {
    let lora = LoraConfig::new(2)
        .with_alpha(6.0)
        .with_target_modules(["1.value"])
        .with_modules_to_save(["classifier"]);
    let net = lora.apply(net()).unwrap();
    assert_eq!(
        trained(&net),
        [
            "layers.1.value.weight.lora.a",
            "layers.1.value.weight.lora.b",
            "classifier.weight",
            "classifier.bias"
        ]
    );
    let adapter = net.layers[1].value.as_ref().unwrap().weight.adapter().unwrap();
    assert_eq!(adapter.scale, 3.0);
    assert_eq!((adapter.a.dims(), adapter.b.dims()), ([8, 2], [2, 8]));
    let data = adapter.a.val().into_data();
    assert!(data.iter::<f32>().all(|x| x.abs() <= 1.0 / 8f32.sqrt()));
    assert!(adapter.b.val().into_data().iter::<f32>().all(|x| x == 0.0));
}

#[test]
fn adapters_do_not_initialise_the_base() {
    let net = LoraConfig::new(2).with_target_modules(["query"]).apply(net()).unwrap();
    assert!(!net.layers[0].attention.query.weight.is_initialized());
    assert!(!net.classifier.weight.is_initialized());
}

#[test]
fn a_name_that_matches_nothing_is_an_error_with_the_candidates() {
    let error = LoraConfig::new(2).with_target_modules(["query", "q_proj"]).apply(net());
    let LoraError::Targets { targets, candidates } = error.unwrap_err() else { panic!() };
    assert_eq!(targets, ["q_proj"]);
    assert_eq!(
        candidates,
        [
            "classifier",
            "layers.*.attention.query (in checkpoints layers.*.attention.self.query)",
            "layers.*.attention.value",
            "layers.*.value",
        ]
    );
    // Whole segments only, and linear layers only.
    for name in ["uery", "embed", "attention", "head"] {
        let error = LoraConfig::new(2).with_target_modules([name]).apply(net()).unwrap_err();
        assert!(error.to_string().contains(&format!("matches `{name}`")), "{error}");
    }
    let outside = LoraConfig::new(2)
        .with_target_units(unit_types![Attention])
        .with_target_modules(["1.value"]);
    assert!(matches!(outside.apply(net()), Err(LoraError::Targets { .. })));
    let error = LoraConfig::new(2).with_modules_to_save(["score"]).apply(net()).unwrap_err();
    let LoraError::ModulesToSave { modules, candidates } = &error else { panic!("{error}") };
    assert_eq!(modules, &["score"]);
    assert!(candidates.contains(&"classifier".to_string()), "{candidates:?}");
}

/// Returns the ranks and scales of the adapters of the first block, by the names of their layers.
fn scales(lora: &LoraConfig) -> Vec<(&'static str, usize, f64)> {
    let net = lora.apply(net()).unwrap();
    let Block { attention, value } = &net.layers[0];
    let value = value.as_ref().unwrap();
    let layers = [("query", &attention.query), ("inner", &attention.value), ("outer", value)];
    let layers = layers.into_iter();
    layers
        .filter_map(|(name, layer)| {
            let adapter = layer.weight.adapter()?;
            assert_eq!(adapter.a.dims()[1], adapter.b.dims()[0]);
            Some((name, adapter.a.dims()[1], adapter.scale))
        })
        .collect()
}

#[test]
fn patterns_give_layers_ranks_and_alphas_of_their_own() {
    let lora = LoraConfig::new(2).with_alpha(6.0);
    assert_eq!(scales(&lora), [("query", 2, 3.0), ("inner", 2, 3.0), ("outer", 2, 3.0)]);
    // A checkpoint key, and a pattern that comes before one that matches too.
    let ranked = lora.clone().with_rank_pattern([("self.query", 4), ("query|value", 3)]);
    assert_eq!(scales(&ranked), [("query", 4, 1.5), ("inner", 3, 2.0), ("outer", 3, 2.0)]);
    let both = ranked.with_alpha_pattern([(r"layers\.\d\.value", 12.0)]);
    assert_eq!(scales(&both), [("query", 4, 1.5), ("inner", 3, 2.0), ("outer", 3, 4.0)]);

    let wrong = lora.clone().with_rank_pattern([("valu", 4)]).apply(net()).unwrap_err();
    let LoraError::UnmatchedPattern { setting, pattern, candidates } = &wrong else {
        panic!("{wrong}")
    };
    assert_eq!((*setting, pattern.as_str(), candidates.len()), ("rank_pattern", "valu", 4));
    let targets = lora.clone().with_target_modules(["query"]);
    let error = targets.with_alpha_pattern([("value", 1.0)]).apply(net()).unwrap_err();
    assert!(error.to_string().starts_with("`alpha_pattern` has `value`, which matches no layer"));
    let error = lora.with_rank_pattern([("v(", 4)]).apply(net()).unwrap_err();
    assert!(matches!(error, LoraError::Pattern { setting: "rank_pattern", .. }), "{error}");
}

#[test]
fn the_factor_of_rslora_is_alpha_by_the_root_of_the_rank() {
    let lora = LoraConfig::new(16).with_alpha(8.0).with_target_modules(["query"]);
    assert_eq!(scales(&lora), [("query", 16, 0.5)]);
    let net = lora.with_rslora(true).apply(net()).unwrap();
    let weight = net.layers[0].attention.query.weight.clone();
    // A base of zeros, and factors of ones: an element is the factor, 8 / 4, times the rank.
    let paths = trained(&net);
    assert_eq!(paths[..2].len(), 2);
    assert!(paths[0].ends_with("query.weight.lora.a"), "the paths are those of Burn: {paths:?}");
    struct Ones(usize);
    impl burn::module::ModuleMapper for Ones {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            self.0 += 1;
            let number = f64::from(u8::from(self.0 > 1));
            param.map(|tensor| tensor.zeros_like() + number)
        }
    }
    let ones = Module::map(weight, &mut Ones(0));
    assert_eq!(ones.val().into_data().iter::<f32>().next(), Some(2.0 * 16.0));
}

#[test]
fn excluded_modules_and_the_output_layer_have_no_adapter() {
    let lora = || LoraConfig::new(2);
    let both = |name: &str| [0, 1].map(|index| format!("layers.{index}.{name}"));
    let excluded = lora().with_excluded_modules(["attention", "classifier"]);
    assert_eq!(adapted(excluded), both("value"));
    let query = lora().with_target_modules(["value"]).with_excluded_modules(["layers.0"]);
    assert_eq!(adapted(query), ["layers.1.attention.value", "layers.1.value"]);
    assert_eq!(adapted(lora().with_target_modules(["all-linear"])).len(), 7);
    let pattern = lora().with_excluded_pattern(r".*attention\..*|.*\.1\..*|classifier");
    assert_eq!(adapted(pattern), ["layers.0.value"]);
    let error = lora().with_excluded_pattern(r"attention\..*").apply(net()).unwrap_err();
    let LoraError::ExcludedModules { modules, .. } = &error else { panic!("{error}") };
    assert_eq!(modules, &[r"attention\..*"]);
    let error = lora().with_excluded_modules(["lm_head"]).apply(net()).unwrap_err();
    let LoraError::ExcludedModules { modules, .. } = &error else { panic!("{error}") };
    assert_eq!(modules, &["lm_head"]);
    let error = lora().with_target_modules(["query"]).with_excluded_modules(["attention"]);
    assert!(matches!(error.apply(net()), Err(LoraError::Targets { .. })));

    #[derive(Module, Debug)]
    #[fsdp_unit(root)]
    struct Decoder {
        up: Linear,
        lm_head: Linear,
    }

    #[fsdp_unit]
    impl Decoder {
        pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
            self.lm_head.forward(self.up.forward(x))
        }
    }

    let linear = || LinearConfig::new(8, 8).init(&Device::flex());
    let apply = |lora: LoraConfig| {
        let net = lora.apply(Decoder { up: linear(), lm_head: linear() }).unwrap();
        [net.up, net.lm_head].map(|layer| layer.weight.adapter().is_some())
    };
    assert_eq!(apply(lora()), [true, true]);
    assert_eq!(apply(lora().with_target_modules(["All-Linear"])), [true, false]);
}

#[test]
fn dropout_of_burns_layers_is_an_error_that_names_them() {
    let lora = LoraConfig::new(2).with_target_modules(["query"]);
    assert!(lora.clone().with_dropout(0.0).apply(net()).is_ok());
    let error = lora.clone().with_dropout(0.1).apply(net()).unwrap_err();
    let LoraError::DropoutLayers { layers } = &error else { panic!("{error}") };
    assert_eq!(
        layers,
        &["layers.*.attention.query (in checkpoints layers.*.attention.self.query)"]
    );
    for prob in [-0.1, 1.0, f64::NAN] {
        let error = lora.clone().with_dropout(prob).apply(net()).unwrap_err();
        assert!(matches!(error, LoraError::Dropout { .. }), "{error}");
    }
}

#[test]
fn adapters_are_attached_once() {
    let lora = LoraConfig::new(2).with_target_modules(["query"]);
    let net = lora.apply(net()).unwrap();
    let error = lora.apply(net).unwrap_err();
    let LoraError::AlreadyAttached { path, .. } = &error else { panic!("{error}") };
    assert_eq!(path, "layers.0.attention.query.weight");
    let net = lora.clone().with_rslora(true).apply(self::net()).unwrap();
    assert!(matches!(lora.apply(net), Err(LoraError::AlreadyAttached { .. })));
    assert_eq!(LoraConfig::new(0).apply(self::net()).unwrap_err(), LoraError::Rank);
    for alpha in [0.0, -1.0, f64::NAN] {
        let error = LoraConfig::new(2).with_alpha(alpha).apply(self::net()).unwrap_err();
        assert!(matches!(error, LoraError::Alpha { .. }), "{error}");
    }
}
