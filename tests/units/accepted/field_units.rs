//! Calls of every form in `#[fsdp_unit(field_units)]`, which hooks the calls of field units.
#![deny(warnings)]

use burn::module::Module;
use burn::nn::attention::{MhaInput, MultiHeadAttention};
use burn::nn::{Dropout, Linear};
use burn::tensor::Tensor;
use fsdp_runtime::__private::Kind;
use fsdp_runtime::{FsdpModule, FsdpUnit, fsdp_unit};

/// Stands for a module of another crate.
#[derive(Module, Debug)]
pub struct Foreign {
    inner: Linear,
}

impl Foreign {
    fn forward<T>(
        &self,
        x: Tensor<3>,
        scale: Option<f64>,
        f: impl Fn(&T) -> T,
        y: &T,
    ) -> Tensor<3> {
        f(y);
        self.inner.forward(x) * scale.unwrap_or(1.0)
    }

    fn forward_names<'a>(&self, names: &'a [&'a str]) -> Result<&'a str, ()> {
        names.first().copied().ok_or(())
    }
}

/// Not a module: its methods take `&mut self` or `self`.
#[derive(Default)]
pub struct Cache {
    len: usize,
}

impl Cache {
    fn forward(&mut self, len: usize) -> usize {
        self.len += len;
        self.len
    }

    fn forward_into(self) -> usize {
        self.len
    }
}

#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    up: Linear,
    #[fsdp(unit)]
    down: Linear,
}

#[fsdp_unit(field_units)]
impl Block {
    pub fn forward(&self, x: Tensor<3>, cache: &mut Cache) -> Tensor<3> {
        cache.forward(1);
        self.down.forward(self.up.forward(x))
    }
}

#[derive(Module, FsdpModule, Debug)]
pub struct Heads {
    #[fsdp(unit, key = "head")]
    heads: Vec<Option<Linear>>,
    dropout: Dropout,
}

#[derive(Module, Debug)]
#[fsdp_unit(root)]
pub struct Model {
    #[fsdp(unit)]
    first: Linear,
    #[fsdp(unit)]
    attention: Option<MultiHeadAttention>,
    blocks: Vec<Block>,
    #[fsdp(unit)]
    array: [Linear; 2],
    #[fsdp(unit)]
    pair: (Linear, Linear),
    #[fsdp(unit, leaf)]
    foreign: Vec<Foreign>,
    #[fsdp(leaf, unit)]
    one: Foreign,
    heads: Heads,
    width: usize,
}

#[fsdp_unit(field_units)]
impl Model {
    pub fn forward(&self, x: Tensor<3>, cache: &mut Cache) -> Result<Tensor<3>, ()> {
        let mut x = self.first.forward(x);
        for block in &self.blocks {
            x = block.forward(x, cache);
        }
        for block in self.blocks.iter().filter(|block| block.down.bias.is_none()) {
            x = block.forward(x, cache);
        }
        x = self.sum(x);
        let last = self.array.len() - 1;
        x = self.array[last].forward(self.array[0].forward(x)).tanh();
        x = (&self.pair.0).forward(x.clone()) + (self.pair.1).forward(x);
        if let Some(attention) = &self.attention {
            x = attention.forward(MhaInput::self_attn(x)).context;
        }
        let y = self.attention.as_ref().ok_or(())?;
        x = y.forward(MhaInput::new(x.clone(), x.clone(), x)).context;
        x = self.attention.as_ref().expect("it is there").forward(MhaInput::self_attn(x)).context;
        // Arguments whose types are inferred from the method's signature.
        x = self.foreign[0].forward(x, None, |y| y + 1, &1);
        x = self.foreign.first().ok_or(())?.forward(
            x,
            Some(2.0),
            |y: &String| y.clone(),
            &"".into(),
        );
        x = self.one.forward(x, self.scale().into(), usize::clone, &3);
        let names = ["a", &format!("b{}", self.width)];
        let name = self.one.forward_names(&names)?.len();
        let parts = vec![self.first.forward(x.clone()), self.first.forward(x)];
        let x = Tensor::cat(parts, 0);
        let mut own = Cache::default();
        let n = own.forward(name);
        own.forward(n);
        assert_eq!(own.forward_into(), 2 * name);
        let run = |x, layer: &&Linear| layer.forward(x);
        let x = self.array.iter().fold(x, |x, layer| run(x, &layer));
        let x = self.heads.heads.iter().flatten().fold(x, |x, head| head.forward(x));
        self.heads.dropout.forward(x.clone());
        self.rest(x)
    }

    /// A statement that is an expression, after one that ends with a block.
    fn sum(&self, x: Tensor<3>) -> Tensor<3> {
        if self.width == 0 {}
        self.first.forward(x.clone()) + x
    }

    fn scale(&self) -> f64 {
        0.5
    }

    fn rest(&self, x: Tensor<3>) -> Result<Tensor<3>, ()> {
        fn item(x: &Linear, y: Tensor<3>) -> Tensor<3> {
            x.forward(y)
        }
        let x = self.first.forward(match x.dims() {
            [0, ..] => return Ok(x),
            _ => item(&self.first, x),
        });
        Ok(Linear::forward(&self.first, x))
    }
}

fn is_unit<M: FsdpUnit>() {}

#[test]
fn modules_of_other_crates_are_leaves_or_units() {
    is_unit::<Model>();
    let units: Vec<_> = Model::LAYOUT.children.iter().filter(|child| child.unit).collect();
    let names: Vec<_> = units.iter().map(|child| child.name).collect();
    assert_eq!(names, ["first", "attention", "array", "pair", "foreign", "one"]);
    assert_eq!(units[4].node.kind, Kind::Leaf);
}
