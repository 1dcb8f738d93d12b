//! Every form of `forward` that the macro hooks.
#![deny(warnings, missing_docs)]

use burn::module::Module;
use burn::nn::Linear;
use burn::tensor::{Bool, Tensor};
use fsdp_runtime::{UnitValue, fsdp_unit};

/// An argument of a type that is not a `UnitValue`.
#[derive(Debug, Default)]
pub struct Cache {
    keys: Vec<Tensor<3>>,
}

/// An error that a step may return.
#[derive(Debug)]
pub struct Full;

/// A block.
#[derive(Module, Debug)]
#[fsdp_unit(tie("up" = "down"))]
pub struct Block {
    up: Linear,
    #[fsdp(key = "output.dense")]
    down: Linear,
}

#[fsdp_unit]
impl Block {
    /// The width of every block.
    pub const WIDTH: usize = 4;

    /// Several inputs, not all of them tensors.
    pub fn forward(
        &self,
        x: Tensor<3>,
        _mask: Option<Tensor<4, Bool>>,
        mut times: usize,
    ) -> Tensor<3> {
        let mut x = x;
        while times > 0 {
            x = self.up.forward(x);
            times -= 1;
        }
        x
    }

    /// Patterns, early return and `?`.
    pub fn forward_step(
        &self,
        (query, scale): (Tensor<3>, f32),
        [first, ..]: [Tensor<3>; 2],
        cache: &mut Cache,
    ) -> Result<Tensor<3>, Full> {
        if cache.keys.len() > Self::WIDTH {
            return Err(Full);
        }
        cache.keys.push(query);
        let last = cache.keys.pop().ok_or(Full)?;
        Ok(self.down.forward(last * scale + first))
    }

    /// Generic over types, constants and lifetimes.
    pub fn forward_any<'a, const D: usize, T>(
        &self,
        x: T,
        names: &'a [&'a str],
        f: impl Fn(Tensor<D>) -> Tensor<D>,
    ) -> Option<Tensor<D>>
    where
        T: Into<Tensor<D>> + UnitValue,
    {
        names.first()?;
        Some(f(x.into()))
    }

    /// Types that name a type parameter and hold `UnitValue`s, and types that never do.
    pub fn forward_generic<T, E, F>(
        &self,
        (first, mut rest): (Option<T>, Vec<[T; 2]>),
        last: Result<impl Into<Tensor<3>> + UnitValue, E>,
        names: &[T],
        map: Option<F>,
        done: Box<dyn FnOnce(T) -> E>,
        _: std::marker::PhantomData<T>,
    ) -> Result<Tensor<3>, E>
    where
        T: Into<Tensor<3>> + Clone + UnitValue,
        F: FnMut(T) -> Tensor<3>,
    {
        let last = last?;
        let rest = rest.pop().into_iter().flatten().chain(names.iter().cloned());
        match (first, map) {
            (Some(first), _) => Err(done(first)),
            (None, Some(map)) => Ok(rest.map(map).fold(last.into(), |sum, x| sum + x)),
            (None, None) => Ok(last.into()),
        }
    }

    /// A generic constant that appears in no argument.
    pub fn forward_zeros<const D: usize>(&self) -> Vec<Tensor<D>> {
        Vec::new()
    }

    /// An owned value that is not `Copy`, a closure, and an argument without a name.
    #[allow(clippy::type_complexity)]
    pub fn forward_with(
        &self,
        cache: Cache,
        f: Box<dyn Fn() -> Tensor<3>>,
        _: usize,
    ) -> (Tensor<3>, Vec<Tensor<3>>) {
        (f(), cache.keys)
    }

    /// No input and no output.
    #[inline]
    #[must_use = "or not"]
    pub fn forward_nothing(self: &Self) {}

    /// # Safety
    ///
    /// None needed.
    pub unsafe fn forward_unchecked(&self, x: Tensor<3>) -> Tensor<3> {
        x
    }

    /// Not hooked: it takes no `&self`.
    pub fn forward_width() -> usize {
        Self::WIDTH
    }

    /// Not hooked: it takes no `&self`.
    pub fn forward_into(self) -> Self {
        self
    }

    /// Not hooked: its name is not `forward` and does not begin with `forward_`.
    pub fn forwards(&self) -> usize {
        1
    }
}

#[test]
fn every_form_of_forward() {
    let _: fn(&Block, Tensor<3>, Option<Tensor<4, Bool>>, usize) -> Tensor<3> = Block::forward;
    let _: for<'a> unsafe fn(&'a Block, Tensor<3>) -> Tensor<3> = Block::forward_unchecked;
    let _ = (Block::forward_width(), Block::forwards);
}
