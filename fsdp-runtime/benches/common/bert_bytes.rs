//! Bytes that a step of the BERT must read and write.

use super::bert::{POSITIONS, Sizes, VOCABULARY};

/// Returns for each kind of work of a step, by its name in [`shares`](super::shares), the bytes that all ranks together
/// read and write if each operand of an operation is read once and each result written once.
///
/// `is_sharded` says whether a rank's optimizer steps a shard or all parameters. `element` is the size of a parameter
/// and of an activation in bytes. Gradients are reduced, and parameters stepped, in f32.
pub fn least_bytes(
    sizes: &Sizes,
    ranks: usize,
    is_sharded: bool,
    element: usize,
) -> Vec<(&'static str, usize)> {
    let &Sizes { batch, length, hidden, layers, inner, .. } = sizes;
    let tokens = batch * length;
    let square = [(hidden, hidden); 4];
    let linears = square.into_iter().chain([(hidden, inner), (inner, hidden)]);
    let weights: usize = linears.clone().map(|(input, output)| input * output).sum();
    let ends: usize = linears.map(|(input, output)| tokens * (input + output)).sum();
    let table = (VOCABULARY + POSITIONS) * hidden;
    let of_layers = layers * (weights + 9 * hidden + inner);
    let parameters = table + 2 * hidden + of_layers + 2 * (hidden + 1);
    // Of a layer and a rank, in elements: the output and the gradients of the input and of the weight.
    let products = 3 * (weights + ends);
    // The weight for the output and for the gradient of the input, and both factors of the gradient of the weight.
    let packed = 2 * (2 * weights + ends);
    // Four matrices forward; eight backward, with the output and its gradient.
    let attention = 12 * tokens * hidden;
    // Two norms with a residual, five biases, and a bias with an activation, with their gradients.
    let passes = tokens * (2 * 8 * hidden + 5 * 3 * hidden + 6 * inner);
    let of_ranks = |elements: usize| ranks * layers * elements * element;
    let replicas = if is_sharded { 1 } else { ranks };
    let reduced = if ranks > 1 { (ranks + 1) * parameters } else { 0 };
    let f32s = |elements: usize| elements * size_of::<f32>();
    vec![
        ("matrix products", of_ranks(products)),
        ("packing of their factors", of_ranks(packed)),
        ("attention, without products", of_ranks(attention)),
        ("norms, activations, loss", of_ranks(passes)),
        // The parameter, its gradient and two moments are read; all but the gradient are written.
        ("optimizer", f32s(replicas * 7 * parameters)),
        ("means of gradients", f32s(reduced)),
        ("zeros", f32s(ranks * table)),
    ]
}
