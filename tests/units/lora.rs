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

#[test]
fn adapters_are_attached_once() {
    let lora = LoraConfig::new(2).with_target_modules(["query"]);
    let net = lora.apply(net()).unwrap();
    let error = lora.apply(net).unwrap_err();
    let LoraError::AlreadyAttached { path, .. } = &error else { panic!("{error}") };
    assert_eq!(path, "layers.0.attention.query.weight");
    assert_eq!(LoraConfig::new(0).apply(self::net()).unwrap_err(), LoraError::Rank);
    for alpha in [0.0, -1.0, f64::NAN] {
        let error = LoraConfig::new(2).with_alpha(alpha).apply(self::net()).unwrap_err();
        assert!(matches!(error, LoraError::Alpha { .. }), "{error}");
    }
}
