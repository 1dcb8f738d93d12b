impl Block {
    /// Builds the block.
    pub fn new(config: &BlockConfig) -> Self {
        config.init()
    }
    /// Attends to `x`, then transforms it.
    pub fn forward(&self, x: Tensor<3>, mask: Option<Tensor<4, Bool>>) -> Tensor<3> {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, ProbeOther as _, ProbeUnitValue as _, ProbeSavable as _,
            ProbeUnsavable as _,
        };
        let (__fsdp_call, __fsdp_cast) = __fsdp::pre_forward_with_tables(
            self,
            |__fsdp_inputs| {
                (&__fsdp::ValueProbe(&x)).collect(__fsdp_inputs);
                (&__fsdp::ValueProbe(&mask)).collect(__fsdp_inputs);
            },
        );
        let __fsdp_self = ::core::option::Option::as_ref(&__fsdp_cast).unwrap_or(self);
        let x = (&__fsdp::ValueProbe(&x)).kind().map(&__fsdp_call, x);
        let mask = (&__fsdp::ValueProbe(&mask)).kind().map(&__fsdp_call, mask);
        let __fsdp_inputs = (__fsdp::ByValue(x), (__fsdp::ByValue(mask), ()));
        let ((__fsdp::ByValue(x), (__fsdp::ByValue(mask), ())), __fsdp_recompute) = (&__fsdp::ValueProbe(
            &__fsdp_inputs,
        ))
            .savability()
            .keep(
                &__fsdp_call,
                __fsdp_self,
                __fsdp_inputs,
                |__fsdp_self: &Self, (__fsdp::ByValue(x), (__fsdp::ByValue(mask), ()))| {
                    __fsdp_self.__fsdp_forward(x, mask)
                },
            );
        let __fsdp_output = __fsdp::run(
            &__fsdp_call,
            || __fsdp_self.__fsdp_forward(x, mask),
        );
        __fsdp::post_forward_recompute(__fsdp_call, __fsdp_output, __fsdp_recompute)
    }
    #[doc(hidden)]
    fn __fsdp_forward(&self, x: Tensor<3>, mask: Option<Tensor<4, Bool>>) -> Tensor<3> {
        let x = self.attention.forward(x, mask);
        self.down.forward(gelu(self.up.forward(x)))
    }
    /// One step of generation.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn forward_step<'a, const D: usize, T: Into<Tensor<D>> + UnitValue>(
        &self,
        __fsdp_0: (Tensor<3>, usize),
        cache: Cache,
        keys: &'a mut Keys,
        other: T,
    ) -> Result<&'a Tensor<3>, CacheError>
    where
        T: Clone,
    {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, ProbeOther as _, ProbeUnitValue as _,
        };
        let __fsdp_call = __fsdp::pre_forward(
            self,
            |__fsdp_inputs| {
                (&__fsdp::ValueProbe(&__fsdp_0)).collect(__fsdp_inputs);
                (&__fsdp::ValueProbe(&cache)).collect(__fsdp_inputs);
                (&__fsdp::ValueProbe(&keys)).collect(__fsdp_inputs);
                __fsdp::KnownTensors.collect(&other, __fsdp_inputs);
            },
        );
        let __fsdp_0 = (&__fsdp::ValueProbe(&__fsdp_0))
            .kind()
            .map(&__fsdp_call, __fsdp_0);
        let cache = (&__fsdp::ValueProbe(&cache)).kind().map(&__fsdp_call, cache);
        let keys = (&__fsdp::ValueProbe(&keys)).kind().map(&__fsdp_call, keys);
        let other = __fsdp::KnownTensors.map(&__fsdp_call, other);
        let __fsdp_output = self
            .__fsdp_forward_step::<D, T>(__fsdp_0, cache, keys, other);
        __fsdp::post_forward(__fsdp_call, __fsdp_output)
    }
    #[expect(clippy::too_many_arguments)]
    #[doc(hidden)]
    fn __fsdp_forward_step<'a, const D: usize, T: Into<Tensor<D>> + UnitValue>(
        &self,
        (query, _): (Tensor<3>, usize),
        mut cache: Cache,
        keys: &'a mut Keys,
        other: T,
    ) -> Result<&'a Tensor<3>, CacheError>
    where
        T: Clone,
    {
        cache.check()?;
        if cache.is_full() {
            return Err(CacheError::Full);
        }
        keys.push(query, other.into())
    }
    /// Inputs of generic types, and inputs of which no caller makes a `UnitValue`.
    fn forward_mapped<T, F>(
        &self,
        first: Option<T>,
        second: impl Into<Tensor<3>> + UnitValue,
        last: &T,
        map: F,
        done: Box<dyn FnOnce(T)>,
    ) -> Tensor<3>
    where
        T: UnitValue,
        F: FnMut(T) -> Tensor<3>,
    {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, ProbeOther as _, ProbeUnitValue as _,
        };
        let (__fsdp_call, __fsdp_cast) = __fsdp::pre_forward_with_tables(
            self,
            |__fsdp_inputs| {
                __fsdp::KnownTensors.collect(&first, __fsdp_inputs);
                __fsdp::KnownTensors.collect(&second, __fsdp_inputs);
                (&__fsdp::ValueProbe(&last)).collect(__fsdp_inputs);
                (&__fsdp::ValueProbe(&map)).collect(__fsdp_inputs);
                (&__fsdp::ValueProbe(&done)).collect(__fsdp_inputs);
            },
        );
        let __fsdp_self = ::core::option::Option::as_ref(&__fsdp_cast).unwrap_or(self);
        let first = __fsdp::KnownTensors.map(&__fsdp_call, first);
        let second = __fsdp::KnownTensors.map(&__fsdp_call, second);
        let last = (&__fsdp::ValueProbe(&last)).kind().map(&__fsdp_call, last);
        let map = (&__fsdp::ValueProbe(&map)).kind().map(&__fsdp_call, map);
        let done = (&__fsdp::ValueProbe(&done)).kind().map(&__fsdp_call, done);
        let __fsdp_output = __fsdp::run(
            &__fsdp_call,
            || __fsdp_self.__fsdp_forward_mapped::<T, F>(first, second, last, map, done),
        );
        __fsdp::post_forward(__fsdp_call, __fsdp_output)
    }
    #[doc(hidden)]
    fn __fsdp_forward_mapped<T, F>(
        &self,
        first: Option<T>,
        second: impl Into<Tensor<3>> + UnitValue,
        last: &T,
        map: F,
        done: Box<dyn FnOnce(T)>,
    ) -> Tensor<3>
    where
        T: UnitValue,
        F: FnMut(T) -> Tensor<3>,
    {
        done(last.clone());
        first.map_or(second.into(), map)
    }
    fn project(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(x)
    }
}
const _: () = {
    use ::fsdp_runtime::__private as __fsdp;
    impl __fsdp::HookedForward for Block {
        const HOOKED: &'static [__fsdp::Forward] = {
            use __fsdp::Fallback as _;
            &[
                __fsdp::Forward {
                    name: "forward",
                    inputs: &[
                        ("x", __fsdp::Probe::<Tensor<3>>::NOT_RECOMPUTABLE),
                        (
                            "mask",
                            __fsdp::Probe::<Option<Tensor<4, Bool>>>::NOT_RECOMPUTABLE,
                        ),
                    ],
                },
                __fsdp::Forward {
                    name: "forward_step",
                    inputs: &[
                        (
                            "input 1",
                            __fsdp::Probe::<(Tensor<3>, usize)>::NOT_RECOMPUTABLE,
                        ),
                        ("cache", __fsdp::Probe::<Cache>::NOT_RECOMPUTABLE),
                        (
                            "keys",
                            ::core::option::Option::Some(
                                __fsdp::NotRecomputable::Borrowed,
                            ),
                        ),
                        (
                            "other",
                            ::core::option::Option::Some(
                                __fsdp::NotRecomputable::Generic,
                            ),
                        ),
                        (
                            "the return value",
                            ::core::option::Option::Some(__fsdp::NotRecomputable::Output),
                        ),
                    ],
                },
                __fsdp::Forward {
                    name: "forward_mapped",
                    inputs: &[
                        (
                            "first",
                            ::core::option::Option::Some(
                                __fsdp::NotRecomputable::Generic,
                            ),
                        ),
                        (
                            "second",
                            ::core::option::Option::Some(
                                __fsdp::NotRecomputable::Generic,
                            ),
                        ),
                        (
                            "last",
                            ::core::option::Option::Some(
                                __fsdp::NotRecomputable::Borrowed,
                            ),
                        ),
                        (
                            "map",
                            ::core::option::Option::Some(
                                __fsdp::NotRecomputable::Generic,
                            ),
                        ),
                        (
                            "done",
                            ::core::option::Option::Some(
                                __fsdp::NotRecomputable::Generic,
                            ),
                        ),
                    ],
                },
            ]
        };
    }
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward", "x");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward", "mask");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_step", "input 1");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_step", "cache");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_step", "keys");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_step", "other");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_step", "the return value");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_mapped", "first");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_mapped", "second");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_mapped", "last");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_mapped", "map");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_mapped", "done");
};
