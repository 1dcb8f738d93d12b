//! Cross-entropy of a linear layer's output, without the output: arguments, and the form that is made
//! of Burn's operations.

mod chunks;

pub(super) use self::chunks::forward;

/// How the loss of a linear layer is computed.
#[derive(Clone, Copy, Debug)]
pub struct LossRule {
    /// Whether the weight is `[classes, width]`, as an embedding is, and not `[width, classes]`.
    pub embedding: bool,
    /// Target of rows that do not count.
    pub ignored: Option<f32>,
    /// Share of the target distribution that is even over all classes.
    pub smoothing: f64,
    /// Whether the loss is divided by the number of rows that count.
    pub mean: bool,
    /// Rows whose logits exist at once.
    pub chunk: usize,
    /// Which gradients are computed: of the hidden values, the weight and the bias.
    pub gradients: [bool; 3],
}

/// Tensors that the loss reads, of one dtype but for the targets.
#[derive(Clone, Debug)]
pub struct LossTensors<T> {
    /// `[rows, width]`
    pub hidden: T,
    /// `[width, classes]`, or its transpose where the rule says so.
    pub weight: T,
    /// `[classes]`
    pub bias: Option<T>,
    /// Classes as whole numbers in f32, `[rows]`.
    pub targets: T,
}

/// The loss and its gradients.
#[derive(Clone, Debug)]
pub struct LossResults<T> {
    /// `[1]`, in f32.
    pub loss: T,
    /// Factor of all gradients, `[1]`, in f32.
    ///
    /// f16 has no numbers for the gradients of a mean over many rows.
    pub factor: T,
    /// The gradients that the rule asks for, in its order, in f32, each less the factor.
    pub gradients: Vec<T>,
}

impl<T> LossTensors<T> {
    /// Returns references to the tensors.
    pub fn each_ref(&self) -> LossTensors<&T> {
        let Self { hidden, weight, bias, targets } = self;
        LossTensors { hidden, weight, bias: bias.as_ref(), targets }
    }

    /// Applies `f` to each tensor.
    pub fn map<U>(self, mut f: impl FnMut(T) -> U) -> LossTensors<U> {
        LossTensors {
            hidden: f(self.hidden),
            weight: f(self.weight),
            bias: self.bias.map(&mut f),
            targets: f(self.targets),
        }
    }

    /// Returns hidden values, weight, targets, and the bias if there is one.
    pub fn into_vec(self) -> Vec<T> {
        [self.hidden, self.weight, self.targets].into_iter().chain(self.bias).collect()
    }

    /// Returns the tensors of a list that [`into_vec`](Self::into_vec) returned.
    pub fn from_vec(tensors: Vec<T>) -> Self {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("hidden values, weight and targets");
        let (hidden, weight, targets) = (next(), next(), next());
        Self { hidden, weight, bias: tensors.next(), targets }
    }
}

impl<T> LossResults<T> {
    /// Returns the loss, the factor and the gradients.
    pub fn into_vec(self) -> Vec<T> {
        [self.loss, self.factor].into_iter().chain(self.gradients).collect()
    }

    /// Returns the results of a list that [`into_vec`](Self::into_vec) returned.
    pub fn from_vec(tensors: Vec<T>) -> Self {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().expect("the loss and the factor");
        let (loss, factor) = (next(), next());
        Self { loss, factor, gradients: tensors.collect() }
    }
}
