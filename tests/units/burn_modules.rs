//! The layouts of `burn::nn` agree with Burn's own traversal: the same parameters, at the same paths.

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
        // Running statistics are shown as parameters, which they are not.
        if !self.path.last().is_some_and(|name| name.starts_with("running_")) {
            self.seen.push((self.path.join("."), param.id));
        }
    }
}

#[derive(Default)]
struct Rebuild(Vec<ParamId>);

impl ParamMapper for Rebuild {
    fn param<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        self.0.push(param.id);
        param
    }
}

fn agrees<M: FsdpModule>(module: M, parameters: usize) {
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
    agrees(LinearConfig::new(2, 3).init(device), 2);
    agrees(LinearConfig::new(2, 3).with_bias(false).init(device), 1);
    agrees(EmbeddingConfig::new(2, 3).init(device), 1);
    agrees(Conv1dConfig::new(2, 3, 1).init(device), 2);
    agrees(Conv2dConfig::new([2, 3], [1, 1]).init(device), 2);
    agrees(Conv3dConfig::new([2, 3], [1, 1, 1]).init(device), 2);
    agrees(ConvTranspose1dConfig::new([2, 3], 1).init(device), 2);
    agrees(ConvTranspose2dConfig::new([2, 3], [1, 1]).init(device), 2);
    agrees(ConvTranspose3dConfig::new([2, 3], [1, 1, 1]).init(device), 2);
    agrees(DeformConv2dConfig::new([2, 3], [1, 1]).init(device), 2);
}

#[test]
fn norms() {
    let device = &Device::default();
    agrees(LayerNormConfig::new(2).init(device), 2);
    agrees(RmsNormConfig::new(2).init(device), 1);
    agrees(BatchNormConfig::new(2).init(device), 2);
    agrees(GroupNormConfig::new(1, 2).init(device), 2);
    agrees(InstanceNormConfig::new(2).init(device), 2);
    agrees(NormalizationConfig::Layer(LayerNormConfig::new(2)).init(device), 2);
    agrees(NormalizationConfig::Batch(BatchNormConfig::new(2)).init(device), 2);
}

#[test]
fn attention_and_transformers() {
    let device = &Device::default();
    agrees(MultiHeadAttentionConfig::new(4, 2).init(device), 8);
    agrees(CrossAttentionConfig::new(4, 4, 2, 2, 2).init(device), 8);
    agrees(PositionWiseFeedForwardConfig::new(4, 8).init(device), 4);
    agrees(TransformerEncoderConfig::new(4, 8, 2, 2).init(device), 2 * 16);
    agrees(TransformerDecoderConfig::new(4, 8, 2, 2).init(device), 2 * 26);
    agrees(PositionalEncodingConfig::new(4).init(device), 0);
    agrees(RotaryEncodingConfig::new(8, 4).init(device), 0);
}

#[test]
fn recurrent_layers() {
    let device = &Device::default();
    agrees(LstmConfig::new(2, 3, true).init(device), 4 * 4);
    agrees(BiLstmConfig::new(2, 3, true).init(device), 2 * 4 * 4);
    agrees(GruConfig::new(2, 3, true).init(device), 3 * 4);
    agrees(BiGruConfig::new(2, 3, true).init(device), 2 * 3 * 4);
}

#[test]
fn activations() {
    let device = &Device::default();
    agrees(PReluConfig::new().init(device), 1);
    agrees(SwiGluConfig::new(2, 3).init(device), 2);
    agrees(ActivationConfig::Gelu.init(device), 0);
    agrees(ActivationConfig::SwiGlu(SwiGluConfig::new(2, 3)).init(device), 2);
    agrees(DropoutConfig::new(0.1).init(), 0);
}
