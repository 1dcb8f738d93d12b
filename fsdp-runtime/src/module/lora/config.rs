//! The configuration of LoRA adapters.

use crate::module::UnitType;

/// LoRA adapters for the linear layers of a model, as in Hugging Face's PEFT.
///
/// An adapter adds `alpha / rank · (a @ b)` to a matrix of shape `[inputs, outputs]`, with trained
/// factors `a` of shape `[inputs, rank]` and `b` of shape `[rank, outputs]` ([LoRA], section 4.1).
/// [`with_rslora`](Self::with_rslora) divides by the root of the rank. `a` is initialised as in PEFT, uniformly within `±1 / sqrt(inputs)`, and `b` with zeros: the
/// model's outputs do not change at first. Parameters are not initialised by attaching adapters.
///
/// [LoRA]: https://arxiv.org/abs/2106.09685
///
/// # Example
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::{Device, Tensor};
/// use fsdp_runtime::prelude::*;
/// use fsdp_runtime::errors::LoraError;
/// use fsdp_runtime::lora::LoraConfig;
/// use fsdp_runtime::nn::{Linear, LinearConfig};
///
/// #[derive(Module, Debug)]
/// #[fsdp_unit(root)]
/// struct Net {
///     query: Linear,
///     classifier: Linear,
/// }
///
/// #[fsdp_unit]
/// impl Net {
///     pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.classifier.forward(self.query.forward(x))
///     }
/// }
///
/// let device = Device::flex();
/// let linear = || LinearConfig::new(8, 8).init(&device);
/// let net = Net { query: linear(), classifier: linear() };
/// let lora = LoraConfig::new(4)
///     .with_alpha(8.0)
///     .with_target_modules(["query"])
///     .with_modules_to_save(["classifier"]);
/// // `fully_shard` comes next.
/// let net = lora.apply(net)?;
/// assert_eq!(net.query.weight.adapter().unwrap().scale, 2.0);
/// assert!(net.classifier.weight.adapter().is_none());
/// # Ok::<_, LoraError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct LoraConfig {
    pub(super) rank: usize,
    pub(super) alpha: f64,
    /// Probability of dropping an element of an adapter's input.
    pub(super) dropout: f64,
    /// Whether alpha is divided by the root of the rank.
    pub(super) rank_stabilised: bool,
    pub(super) rank_pattern: Vec<(String, usize)>,
    pub(super) alpha_pattern: Vec<(String, f64)>,
    pub(super) target_modules: Vec<String>,
    pub(super) target_pattern: Option<String>,
    pub(super) layers_to_transform: Vec<usize>,
    pub(super) layers_pattern: Vec<String>,
    pub(super) excluded_modules: Vec<String>,
    pub(super) excluded_pattern: Option<String>,
    pub(super) target_units: Vec<UnitType>,
    pub(super) modules_to_save: Vec<String>,
}

impl LoraConfig {
    /// Returns adapters of a rank for every linear layer, with an alpha equal to the rank.
    pub fn new(rank: usize) -> Self {
        Self {
            rank,
            alpha: rank as f64,
            dropout: 0.0,
            rank_stabilised: false,
            rank_pattern: Vec::new(),
            alpha_pattern: Vec::new(),
            target_modules: Vec::new(),
            target_pattern: None,
            layers_to_transform: Vec::new(),
            layers_pattern: Vec::new(),
            excluded_modules: Vec::new(),
            excluded_pattern: None,
            target_units: Vec::new(),
            modules_to_save: Vec::new(),
        }
    }

    /// Sets the numerator of the factor `alpha / rank` of an adapter.
    pub fn with_alpha(mut self, alpha: f64) -> Self {
        self.alpha = alpha;
        self
    }

    /// Sets the probability of zeroing an element of an adapter's input in training, in `[0, 1)`. The
    /// other elements are multiplied by `1 / (1 - prob)`. The input of the matrix itself is not changed.
    /// Default: 0. PEFT's `lora_dropout`.
    ///
    /// The masks are drawn as those of [`nn::Dropout`](crate::nn::Dropout). An adapter drops elements on
    /// an autodiff device, while its factors are trained. Only [`nn::Linear`](crate::nn::Linear) has an
    /// adapter's input. `weight.val()` has the adapter added, without dropout.
    ///
    /// With a probability above 0, or [`with_rslora`](Self::with_rslora), `Param::adapter` returns `None`
    /// for a matrix with an adapter, as it does in a sharded model.
    pub fn with_dropout(mut self, prob: f64) -> Self {
        self.dropout = prob;
        self
    }

    /// Sets whether the factor of an adapter is `alpha / sqrt(rank)` in place of `alpha / rank`, so that
    /// the size of its gradients does not depend on the rank ([rsLoRA]). Default: false. PEFT's
    /// `use_rslora`.
    ///
    /// [rsLoRA]: https://arxiv.org/abs/2312.03732
    pub fn with_rslora(mut self, rank_stabilised: bool) -> Self {
        self.rank_stabilised = rank_stabilised;
        self
    }

    /// Gives the layers that a pattern matches another rank. PEFT's `rank_pattern`.
    ///
    /// A pattern is a regular expression for the end of a layer's module path, or of its checkpoint key,
    /// in whole segments: `query`, `attention.query`, `layers\.[01]\..*`. With `^` at its start it is one
    /// for the whole name. The first pattern that matches counts. The syntax is that of the crate
    /// `regex`, which has no look-around and no references.
    pub fn with_rank_pattern<S: Into<String>>(
        mut self,
        ranks: impl IntoIterator<Item = (S, usize)>,
    ) -> Self {
        self.rank_pattern = ranks.into_iter().map(|(name, rank)| (name.into(), rank)).collect();
        self
    }

    /// Gives the layers that a pattern matches another alpha. Patterns match as in
    /// [`with_rank_pattern`](Self::with_rank_pattern). PEFT's `alpha_pattern`.
    pub fn with_alpha_pattern<S: Into<String>>(
        mut self,
        alphas: impl IntoIterator<Item = (S, f64)>,
    ) -> Self {
        self.alpha_pattern = alphas.into_iter().map(|(name, alpha)| (name.into(), alpha)).collect();
        self
    }

    /// Restricts adapters to the linear layers that a name matches. A name is the last segments of
    /// the layer's module path, or of its checkpoint key: `query` or `attention.query` of the field
    /// `layers.0.attention.query`, and `self.query` where the key is `attention.self.query`.
    ///
    /// The single name `all-linear` is PEFT's: every linear layer but the output layer, which is one that
    /// `lm_head`, `lm_head.decoder`, `cls.predictions.decoder`, `embed_out` or `output_layer` matches.
    pub fn with_target_modules<S: Into<String>>(
        mut self,
        names: impl IntoIterator<Item = S>,
    ) -> Self {
        self.target_modules = names.into_iter().map(Into::into).collect();
        self
    }

    /// Restricts adapters to the linear layers whose whole module path, or whole checkpoint key, the regular
    /// expression `pattern` matches, such as `.*\.self_attn\.(q|v)_proj`. Target modules restrict them
    /// further. The syntax is that of the crate `regex`. PEFT's `target_modules` as a text.
    pub fn with_target_pattern(mut self, pattern: impl Into<String>) -> Self {
        self.target_pattern = Some(pattern.into());
        self
    }

    /// Restricts adapters to the linear layers in blocks of these numbers, from 0: 3 in
    /// `model.layers.3.mlp.up_proj`. The number is the first segment that is one. Default: all blocks.
    /// PEFT's `layers_to_transform`.
    pub fn with_layers_to_transform(mut self, numbers: impl IntoIterator<Item = usize>) -> Self {
        self.layers_to_transform = numbers.into_iter().collect();
        self
    }

    /// Sets the names of the lists of blocks that
    /// [`with_layers_to_transform`](Self::with_layers_to_transform) counts, as regular expressions: `layers`
    /// or `h`. Default: any name. PEFT's `layers_pattern`.
    pub fn with_layers_pattern<S: Into<String>>(
        mut self,
        names: impl IntoIterator<Item = S>,
    ) -> Self {
        self.layers_pattern = names.into_iter().map(Into::into).collect();
        self
    }

    /// Gives the linear layers in these modules no adapter, although they are targets. A name matches as
    /// in [`with_target_modules`](Self::with_target_modules), and stands for all layers in the module.
    /// PEFT's `exclude_modules`.
    pub fn with_excluded_modules<S: Into<String>>(
        mut self,
        names: impl IntoIterator<Item = S>,
    ) -> Self {
        self.excluded_modules = names.into_iter().map(Into::into).collect();
        self
    }

    /// Gives the linear layers no adapter whose whole module path, or whole checkpoint key, the regular
    /// expression `pattern` matches. It excludes layers beside those of
    /// [`with_excluded_modules`](Self::with_excluded_modules). PEFT's `exclude_modules` as a text.
    pub fn with_excluded_pattern(mut self, pattern: impl Into<String>) -> Self {
        self.excluded_pattern = Some(pattern.into());
        self
    }

    /// Restricts adapters to the linear layers in units of these types, directly or below:
    /// `unit_types![BertLayer]`. Target modules restrict them further.
    pub fn with_target_units(mut self, units: &[UnitType]) -> Self {
        self.target_units = units.to_vec();
        self
    }

    /// Keeps modules trained in full, such as a new head. A name matches as in
    /// [`with_target_modules`](Self::with_target_modules), and stands for all parameters in the
    /// module. These modules get no adapters, and are saved with the adapters.
    pub fn with_modules_to_save<S: Into<String>>(
        mut self,
        names: impl IntoIterator<Item = S>,
    ) -> Self {
        self.modules_to_save = names.into_iter().map(Into::into).collect();
        self
    }

    /// Returns the rank of the adapters that no pattern matches.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the numerator of the factor of the adapters that no pattern matches.
    pub fn alpha(&self) -> f64 {
        self.alpha
    }

    /// Returns the probability of zeroing an element of an adapter's input.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }

    /// Returns whether the factor of an adapter is `alpha / sqrt(rank)`.
    pub fn rslora(&self) -> bool {
        self.rank_stabilised
    }

    /// Returns the patterns of layers with another rank.
    pub fn rank_pattern(&self) -> &[(String, usize)] {
        &self.rank_pattern
    }

    /// Returns the patterns of layers with another alpha.
    pub fn alpha_pattern(&self) -> &[(String, f64)] {
        &self.alpha_pattern
    }

    /// Returns the names of the target modules; none stands for every linear layer.
    pub fn target_modules(&self) -> &[String] {
        &self.target_modules
    }

    /// Returns the regular expression for the names of the target modules, if there is one.
    pub fn target_pattern(&self) -> Option<&str> {
        self.target_pattern.as_deref()
    }

    /// Returns the numbers of the blocks with adapters; none stands for every block.
    pub fn layers_to_transform(&self) -> &[usize] {
        &self.layers_to_transform
    }

    /// Returns the names of the lists of blocks that are counted; none stands for any name.
    pub fn layers_pattern(&self) -> &[String] {
        &self.layers_pattern
    }

    /// Returns the names of the modules without adapters.
    pub fn excluded_modules(&self) -> &[String] {
        &self.excluded_modules
    }

    /// Returns the regular expression for the names of layers without adapters, if there is one.
    pub fn excluded_pattern(&self) -> Option<&str> {
        self.excluded_pattern.as_deref()
    }

    /// Returns the names of the modules that are trained in full.
    pub fn modules_to_save(&self) -> &[String] {
        &self.modules_to_save
    }
}
