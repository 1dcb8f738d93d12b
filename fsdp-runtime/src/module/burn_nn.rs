//! [`FsdpModule`] for the modules of `burn::nn`.
//!
//! Fields have Burn's names. Where PyTorch has the same module, checkpoint keys have PyTorch's
//! names, so that PyTorch checkpoints load without annotations. `gamma` is `weight`, and `beta` is
//! `bias`. The file holds the weight of a `Linear` transposed.

use burn::module::{Flag, Module, ModuleVisitor, Param, ParamId, RunningState};
use burn::nn::activation::*;
use burn::nn::attention::{CrossAttention, MultiHeadAttention};
use burn::nn::conv::{
    Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, DeformConv2d,
};
use burn::nn::interpolate::{Interpolate1d, Interpolate2d};
use burn::nn::loss::*;
use burn::nn::norm::Normalization;
use burn::nn::pool::*;
use burn::nn::transformer::{
    PositionWiseFeedForward, TransformerDecoder, TransformerDecoderLayer, TransformerEncoder,
    TransformerEncoderLayer,
};
use burn::nn::{
    BatchNorm, BiGru, BiLstm, BiRnn, CosineSimilarity, Dropout, Embedding, Fold4d, GateController,
    GaussianNoise, GroupNorm, Gru, Identity, InstanceNorm, LayerNorm, Linear, LocalResponseNorm,
    Lstm, PairwiseDistance, PixelShuffle, PixelUnshuffle, PositionalEncoding, RmsNorm, Rnn,
    RotaryEncoding, Unfold4d,
};
use burn::tensor::{DType, Tensor, bf16, f16};

use super::containers::constant;
use super::contract::{FsdpModule, ParamMapper, ParamVisitor};
use super::node::{Child, Kind, Node};
use super::opaque::{map_leaf, visit_leaf};

type Matrix = Param<Tensor<2>>;
type Vector = Param<Tensor<1>>;

/// Implements [`FsdpModule`] for a module with public fields.
///
/// A field is `field: Type`, followed by `as "key"` if its name in a checkpoint differs, and by
/// `where transposed` if the checkpoint holds the matrix transposed. Fields without parameters are
/// omitted. `draws` names an omitted dropout field, which cannot be recomputed.
macro_rules! module {
    ($ty:ident {
        $($field:ident: $field_ty:ty $(as $key:literal)? $(where $transposed:ident)?),+ $(,)?
    } $(draws $dropout:ident)?) => {
        impl FsdpModule for $ty {
            const LAYOUT: Node = Node {
                ty: stringify!($ty),
                kind: Kind::Module,
                children: &[$(Child {
                    name: stringify!($field),
                    key: key!($($key)?),
                    transposed: transposed!($($transposed)?),
                    unit: false,
                    group: None,
                    split: None,
                    node: &<$field_ty as FsdpModule>::LAYOUT,
                }),+],
                ties: &[],
            };

            fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
                let mut children = Self::LAYOUT.children.iter();
                $(if let Some(child) = children.next() {
                    self.$field.visit_field(child, visitor);
                })+
                $(self.$dropout.visit_params(visitor);)?
            }

            fn map_params<P: ParamMapper>(mut self, mapper: &mut P) -> Self {
                let mut children = Self::LAYOUT.children.iter();
                $(if let Some(child) = children.next() {
                    self.$field = self.$field.map_field(child, mapper);
                })+
                self
            }
        }
    };
}
/// The checkpoint key of a field, as an `Option`.
macro_rules! key {
    () => {
        None
    };
    ($key:literal) => {
        Some($key)
    };
}
/// Whether a field is declared as `transposed`.
macro_rules! transposed {
    () => {
        false
    };
    (transposed) => {
        true
    };
}

/// Implements [`FsdpModule`] for an enum of modules. The variant is known only when the model is
/// sharded, so the static layout is a leaf. The variant's name is a segment of the module path, as
/// in Burn's traversal, but not of the checkpoint key.
macro_rules! choice {
    ($ty:ident { $($variant:ident($inner:ty)),+ $(,)? }) => {
        impl FsdpModule for $ty {
            const LAYOUT: Node = Node::plain(stringify!($ty), Kind::Leaf);

            fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
                match self {
                    $(Self::$variant(module) => module.visit_field(variant!($variant($inner)), visitor),)+
                    // A later version of Burn may have more variants.
                    #[allow(unreachable_patterns)]
                    other => visit_leaf(other, visitor),
                }
            }

            fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
                match self {
                    $(Self::$variant(module) => {
                        Self::$variant(module.map_field(variant!($variant($inner)), mapper))
                    })+
                    #[allow(unreachable_patterns)]
                    other => map_leaf(other, mapper),
                }
            }
        }
    };
}
/// The field below a variant of an enum of modules.
macro_rules! variant {
    ($variant:ident($inner:ty)) => {{
        const CHILD: &Child = &Child {
            name: stringify!($variant),
            key: Some(""),
            transposed: false,
            unit: false,
            group: None,
            split: None,
            node: &<$inner as FsdpModule>::LAYOUT,
        };
        CHILD
    }};
}

// Layers.
module!(Linear { weight: Matrix where transposed, bias: Option<Vector> });
module!(Embedding { weight: Matrix });
module!(Conv1d { weight: Param<Tensor<3>>, bias: Option<Vector> });
module!(Conv2d { weight: Param<Tensor<4>>, bias: Option<Vector> });
module!(Conv3d { weight: Param<Tensor<5>>, bias: Option<Vector> });
module!(ConvTranspose1d { weight: Param<Tensor<3>>, bias: Option<Vector> });
module!(ConvTranspose2d { weight: Param<Tensor<4>>, bias: Option<Vector> });
module!(ConvTranspose3d { weight: Param<Tensor<5>>, bias: Option<Vector> });
module!(DeformConv2d { weight: Param<Tensor<4>>, bias: Option<Vector> });

// Norms.
module!(LayerNorm { gamma: Vector as "weight", beta: Option<Vector> as "bias" });
module!(RmsNorm { gamma: Vector as "weight" });
module!(BatchNorm {
    gamma: Vector as "weight",
    beta: Vector as "bias",
    running_mean: RunningState<Tensor<1>>,
    running_var: RunningState<Tensor<1>>,
});
module!(GroupNorm { gamma: Option<Vector> as "weight", beta: Option<Vector> as "bias" });
module!(InstanceNorm { gamma: Option<Vector> as "weight", beta: Option<Vector> as "bias" });
choice!(Normalization {
    Identity(Identity),
    Batch(BatchNorm),
    Group(GroupNorm),
    Instance(InstanceNorm),
    Layer(LayerNorm),
    Rms(RmsNorm),
});

// Attention and transformers. The keys are Burn's, as PyTorch packs query, key and value into one
// matrix.
module!(MultiHeadAttention { query: Linear, key: Linear, value: Linear, output: Linear } draws dropout);
module!(PositionWiseFeedForward { linear_inner: Linear, linear_outer: Linear } draws dropout);
module!(TransformerEncoder { layers: Vec<TransformerEncoderLayer> });
module!(TransformerEncoderLayer {
    mha: MultiHeadAttention,
    pwff: PositionWiseFeedForward,
    norm_1: LayerNorm,
    norm_2: LayerNorm,
} draws dropout);
module!(TransformerDecoder { layers: Vec<TransformerDecoderLayer> });
module!(TransformerDecoderLayer {
    cross_attn: MultiHeadAttention,
    self_attn: MultiHeadAttention,
    pwff: PositionWiseFeedForward,
    norm_1: LayerNorm,
    norm_2: LayerNorm,
    norm_3: LayerNorm,
} draws dropout);

// Recurrent layers. The keys are Burn's, as PyTorch packs all gates into one matrix.
module!(GateController { input_transform: Linear, hidden_transform: Linear });
module!(Rnn { gate: GateController, hidden_activation: Activation });
module!(BiRnn { forward: Rnn, reverse: Rnn });
module!(Lstm {
    input_gate: GateController,
    forget_gate: Option<GateController>,
    output_gate: GateController,
    cell_gate: GateController,
    gate_activation: Activation,
    cell_activation: Activation,
    hidden_activation: Activation,
});
module!(BiLstm { forward: Lstm, reverse: Lstm });
module!(Gru {
    update_gate: GateController,
    reset_gate: GateController,
    new_gate: GateController,
    gate_activation: Activation,
    hidden_activation: Activation,
});
module!(BiGru { forward: Gru, reverse: Gru });

// Activations with parameters.
module!(PRelu { alpha: Vector as "weight" });
module!(SwiGlu { linear_inner: Linear, linear_outer: Linear });
choice!(Activation {
    Identity(Identity),
    Gelu(Gelu),
    PRelu(PRelu),
    Relu(Relu),
    LeakyRelu(LeakyRelu),
    SwiGlu(SwiGlu),
    Selu(Selu),
    Sigmoid(Sigmoid),
    Tanh(Tanh),
    HardSigmoid(HardSigmoid),
    HardSwish(HardSwish),
    Softplus(Softplus),
    Softsign(Softsign),
    Elu(Elu),
    Celu(Celu),
    ThresholdedRelu(ThresholdedRelu),
    HardShrink(HardShrink),
    SoftShrink(SoftShrink),
    Shrink(Shrink),
});

// Modules without parameters.
constant!(
    Celu,
    Elu,
    GLU,
    Gelu,
    HardShrink,
    HardSigmoid,
    HardSwish,
    Hardtanh,
    LeakyRelu,
    LogSigmoid,
    Mish,
    Relu,
    Relu6,
    Selu,
    Shrink,
    SiLU,
    Sigmoid,
    SoftShrink,
    Softplus,
    Softsign,
    Tanh,
    Tanhshrink,
    Threshold,
    ThresholdedRelu
);
constant!(
    BinaryCrossEntropyLoss,
    CTCLoss,
    CosineEmbeddingLoss,
    GaussianNLLLoss,
    HingeEmbeddingLoss,
    HuberLoss,
    KLDivLoss,
    LpLoss,
    MarginRankingLoss,
    MseLoss,
    MultiMarginLoss,
    PoissonNllLoss,
    RNNTLoss,
    SmoothL1Loss,
    SoftMarginLoss,
    TripletMarginLoss
);
constant!(
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AvgPool1d,
    AvgPool2d,
    MaxPool1d,
    MaxPool2d
);
constant!(
    CosineSimilarity,
    Fold4d,
    Identity,
    Interpolate1d,
    Interpolate2d,
    LocalResponseNorm,
    PairwiseDistance,
    PixelShuffle,
    PixelUnshuffle,
    Unfold4d
);
constant!(bf16, f16, Param<Flag>);

/// Implements [`FsdpModule`] for a module without parameters that holds tables, given the fields. A
/// field `in_device_dtype` must have the dtype of the device.
macro_rules! tables {
    ($($ty:ident { $field:ident: $in_device_dtype:literal })+) => {$(
        impl FsdpModule for $ty {
            const LAYOUT: Node = Node::plain(stringify!($ty), Kind::Constant);

            fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
                visitor.table(&self.$field, $in_device_dtype);
            }

            fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
                let mut module = mapper.unmanaged(self);
                module.$field = mapper.table(module.$field, $in_device_dtype);
                module
            }
        }
    )+};
}
// `RotaryEncoding::forward` multiplies its input by a matrix that it makes in the device's default
// dtype, and the product by the table. So the table must have that dtype.
tables!(
    PositionalEncoding { sinusoids: false }
    RotaryEncoding { freq_complex: true }
);

impl FsdpModule for CrossEntropyLoss {
    const LAYOUT: Node = Node::plain("CrossEntropyLoss", Kind::Constant);

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        self.weights.iter().for_each(|weights| visitor.table(weights, false));
    }

    fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
        let mut loss = mapper.unmanaged(self);
        loss.weights = loss.weights.map(|weights| mapper.table(weights, false));
        loss
    }
}

/// Implements [`FsdpModule`] for a module without parameters that draws from Burn's own generator,
/// given the condition under which it draws and what to use instead under recomputation.
macro_rules! random {
    ($($ty:ident, $draws:expr, $instead:literal;)+) => {$(
        impl FsdpModule for $ty {
            const LAYOUT: Node = Node::plain(stringify!($ty), Kind::Constant);

            fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
                let draws: fn(&Self) -> bool = $draws;
                if draws(self) {
                    visitor.unrepeatable(stringify!($ty), $instead);
                }
            }

            fn map_params<P: ParamMapper>(self, _: &mut P) -> Self {
                self
            }
        }
    )+};
}
random!(
    Dropout, |module| module.prob > 0.0,
        "use `fsdp_runtime::nn::Dropout`, or probability 0 where it lies in a module of Burn";
    GaussianNoise, |module| module.std > 0.0, "draw the noise outside, and make it an input";
    RRelu, |_| true, "use `LeakyRelu` or `PRelu`";
);

/// A plain tensor, which Burn neither trains nor saves.
impl<const D: usize> FsdpModule for Tensor<D> {
    const LAYOUT: Node = Node::plain("Tensor", Kind::Constant);

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        visitor.table(self, false);
    }

    fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
        let table = mapper.unmanaged(self);
        mapper.table(table, false)
    }
}

/// Implements [`FsdpModule`] for plain tensors without floats.
macro_rules! constant_tensor {
    ($($kind:ty),+) => {$(
        impl<const D: usize> FsdpModule for Tensor<D, $kind> {
            const LAYOUT: Node = Node::plain("Tensor", Kind::Constant);

            fn visit_params<V: ParamVisitor>(&self, _: &mut V) {}

            fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
                mapper.unmanaged(self)
            }
        }
    )+};
}
constant_tensor!(burn::tensor::Int, burn::tensor::Bool);

/// Running statistics, such as those of a `BatchNorm`. They are not parameters: every forward in
/// training updates them, and each rank has its own.
impl<const D: usize> FsdpModule for RunningState<Tensor<D>> {
    const LAYOUT: Node = Node::plain("Tensor", Kind::Constant);

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        struct Id(Option<ParamId>);
        impl ModuleVisitor for Id {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0 = Some(param.id);
            }
        }
        let instead = "leave the unit out of `activation_checkpointing`, or use a `GroupNorm`";
        visitor.unrepeatable("RunningState", instead);
        // Burn holds the value's lock during `visit`. A visitor may communicate, which must not
        // happen under that lock, so only the id is read there.
        let mut id = Id(None);
        self.visit(&mut id);
        if let Id(Some(id)) = id {
            // `value_sync` includes the last update of this thread.
            let value = self.value_sync();
            if value.dtype() == DType::F32 {
                visitor.full_precision("RunningState");
            }
            visitor.buffer(&Param::initialized(id, value));
        }
    }

    fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
        mapper.unmanaged(self)
    }
}

/// The fields of `CrossAttention` are private, so Burn's own traversal reads them.
impl FsdpModule for CrossAttention {
    const LAYOUT: Node = Node::plain("CrossAttention", Kind::Leaf);

    fn visit_params<V: ParamVisitor>(&self, visitor: &mut V) {
        visit_leaf(self, visitor);
    }

    fn map_params<P: ParamMapper>(self, mapper: &mut P) -> Self {
        map_leaf(self, mapper)
    }
}
