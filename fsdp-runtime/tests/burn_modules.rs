//! The layouts of the modules of `burn::nn` name the parameters that Burn's own traversal finds, at
//! the same paths.

use burn::module::{ModuleVisitor, Param, ParamId};
use burn::nn::activation::ActivationConfig;
use burn::nn::attention::{CrossAttentionConfig, MultiHeadAttentionConfig};
use burn::nn::conv::*;
use burn::nn::norm::NormalizationConfig;
use burn::nn::transformer::*;
use burn::nn::*;
use burn::tensor::{Device, Tensor};
use fsdp_runtime::__private::{Child, ParamMapper, ParamVisitor};
use fsdp_runtime::FsdpModule;

/// Parameters by path, as the layout walks them.
#[derive(Default)]
struct Ours {
    path: Vec<String>,
    seen: Vec<(String, ParamId)>,
}

impl ParamVisitor for Ours {
    fn enter(&mut self, child: &'static Child, index: Option<usize>) {
        self.path.push(index.map_or_else(|| child.name.to_string(), |index| index.to_string()));
    }

    fn exit(&mut self) {
        self.path.pop();
    }

    fn param<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.seen.push((self.path.join("."), param.id));
    }

    fn leaf_param<const D: usize>(&mut self, path: &[String], param: &Param<Tensor<D>>) {
        let path: Vec<_> = self.path.iter().chain(path).cloned().collect();
        self.seen.push((path.join("."), param.id));
    }
}

/// Parameters by path, as Burn's visitor finds them.
#[derive(Default)]
struct Burns {
    path: Vec<String>,
    seen: Vec<(String, ParamId)>,
}

impl ModuleVisitor for Burns {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // Burn visits running statistics as if they were parameters.
        if !self.path.last().is_some_and(|name| name.starts_with("running_")) {
            self.seen.push((self.path.join("."), param.id));
        }
    }
}

/// Parameters in the order in which a module is rebuilt.
#[derive(Default)]
struct Rebuild(Vec<ParamId>);

impl ParamMapper for Rebuild {
    fn param<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0.push(param.id);
        param
    }
}

/// Asserts that all traversals of a module find `parameters` parameters, in one order.
fn assert_agrees<M: FsdpModule>(module: M, parameters: usize) {
    let ty = M::LAYOUT.ty;
    let (mut ours, mut burns) = (Ours::default(), Burns::default());
    module.visit_params(&mut ours);
    module.visit(&mut burns);
    assert_eq!(ours.seen, burns.seen, "{ty}");
    assert_eq!(ours.seen.len(), parameters, "{ty}");

    let mut attach = Rebuild::default();
    let rebuilt = module.map_params(&mut attach);
    let ids: Vec<_> = ours.seen.iter().map(|(_, id)| *id).collect();
    assert_eq!(attach.0, ids, "{ty}, rebuilt");
    let mut again = Ours::default();
    rebuilt.visit_params(&mut again);
    assert_eq!(again.seen, ours.seen, "{ty}, rebuilt");
}

#[test]
fn layers() {
    let device = &Device::default();
    assert_agrees(LinearConfig::new(2, 3).init(device), 2);
    assert_agrees(LinearConfig::new(2, 3).with_bias(false).init(device), 1);
    assert_agrees(EmbeddingConfig::new(2, 3).init(device), 1);
    assert_agrees(Conv1dConfig::new(2, 3, 1).init(device), 2);
    assert_agrees(Conv2dConfig::new([2, 3], [1, 1]).init(device), 2);
    assert_agrees(Conv3dConfig::new([2, 3], [1, 1, 1]).init(device), 2);
    assert_agrees(ConvTranspose1dConfig::new([2, 3], 1).init(device), 2);
    assert_agrees(ConvTranspose2dConfig::new([2, 3], [1, 1]).init(device), 2);
    assert_agrees(ConvTranspose3dConfig::new([2, 3], [1, 1, 1]).init(device), 2);
    assert_agrees(DeformConv2dConfig::new([2, 3], [1, 1]).init(device), 2);
}

#[test]
fn norms() {
    let device = &Device::default();
    assert_agrees(LayerNormConfig::new(2).init(device), 2);
    assert_agrees(fsdp_runtime::nn::LayerNormConfig::new(2).init(device), 2);
    assert_agrees(fsdp_runtime::nn::LayerNormConfig::new(2).with_bias(false).init(device), 1);
    assert_agrees(RmsNormConfig::new(2).init(device), 1);
    assert_agrees(fsdp_runtime::nn::RmsNormConfig::new(2).init(device), 1);
    assert_agrees(BatchNormConfig::new(2).init(device), 2);
    assert_agrees(GroupNormConfig::new(1, 2).init(device), 2);
    assert_agrees(InstanceNormConfig::new(2).init(device), 2);
    assert_agrees(NormalizationConfig::Layer(LayerNormConfig::new(2)).init(device), 2);
    assert_agrees(NormalizationConfig::Batch(BatchNormConfig::new(2)).init(device), 2);
}

#[test]
fn attention_and_transformers() {
    let device = &Device::default();
    assert_agrees(MultiHeadAttentionConfig::new(4, 2).init(device), 8);
    assert_agrees(CrossAttentionConfig::new(4, 4, 2, 2, 2).init(device), 8);
    assert_agrees(PositionWiseFeedForwardConfig::new(4, 8).init(device), 4);
    assert_agrees(TransformerEncoderConfig::new(4, 8, 2, 2).init(device), 2 * 16);
    assert_agrees(TransformerDecoderConfig::new(4, 8, 2, 2).init(device), 2 * 26);
    assert_agrees(PositionalEncodingConfig::new(4).init(device), 0);
    assert_agrees(RotaryEncodingConfig::new(8, 4).init(device), 0);
    assert_agrees(fsdp_runtime::nn::RotaryEncodingConfig::new(8, 4).init(device), 0);
}

#[test]
fn recurrent_layers() {
    let device = &Device::default();
    assert_agrees(LstmConfig::new(2, 3, true).init(device), 4 * 4);
    assert_agrees(BiLstmConfig::new(2, 3, true).init(device), 2 * 4 * 4);
    assert_agrees(GruConfig::new(2, 3, true).init(device), 3 * 4);
    assert_agrees(BiGruConfig::new(2, 3, true).init(device), 2 * 3 * 4);
}

#[test]
fn activations() {
    let device = &Device::default();
    assert_agrees(PReluConfig::new().init(device), 1);
    assert_agrees(SwiGluConfig::new(2, 3).init(device), 2);
    assert_agrees(fsdp_runtime::nn::SwiGluConfig::new(2, 3).init(device), 2);
    assert_agrees(fsdp_runtime::nn::SwiGluConfig::new(2, 3).with_bias(true).init(device), 4);
    assert_agrees(ActivationConfig::Gelu.init(device), 0);
    assert_agrees(ActivationConfig::SwiGlu(SwiGluConfig::new(2, 3)).init(device), 2);
    assert_agrees(DropoutConfig::new(0.1).init(), 0);
}
