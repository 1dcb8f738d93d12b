pub struct Block {
    up: Linear,
}
const _: () = {
    use ::fsdp_runtime::__private as __fsdp;
    trait __FsdpDerived
    where
        Block: __fsdp::DerivesModule,
    {}
    impl __fsdp::FsdpModule for Block {
        const LAYOUT: __fsdp::Node = __fsdp::Node {
            ty: "Block",
            kind: __fsdp::Kind::Unit { root: false },
            children: &[
                __fsdp::Child {
                    name: "up",
                    key: ::core::option::Option::None,
                    transposed: false,
                    unit: false,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Linear as __fsdp::FsdpModule>::LAYOUT,
                },
            ],
            ties: &[],
        };
        fn visit_params<__V: __fsdp::ParamVisitor>(&self, __fsdp_visitor: &mut __V) {
            let __fsdp_children = Self::LAYOUT.children;
            <Linear as __fsdp::FsdpModule>::visit_field(
                &self.up,
                &__fsdp_children[0],
                __fsdp_visitor,
            );
        }
        fn map_params<__M: __fsdp::ParamMapper>(self, __fsdp_mapper: &mut __M) -> Self {
            let __fsdp_children = Self::LAYOUT.children;
            Self {
                up: <Linear as __fsdp::FsdpModule>::map_field(
                    self.up,
                    &__fsdp_children[0],
                    __fsdp_mapper,
                ),
            }
        }
        const RECOMPUTED: ::core::primitive::bool = true;
        const FORWARDS: &'static [__fsdp::Forward] = {
            use __fsdp::Fallback as _;
            __fsdp::Probe::<Block>::HOOKED
        };
    }
    impl __fsdp::FsdpUnit for Block {}
    const __FSDP_LAYOUT: &__fsdp::Node = &<Block as __fsdp::FsdpModule>::LAYOUT;
    const _: () = __fsdp::have_distinct_keys::<
        { __fsdp::num_keys(__FSDP_LAYOUT) },
    >(__FSDP_LAYOUT);
    const _: () = __fsdp::is_a_sound_unit(__FSDP_LAYOUT);
    const _: () = __fsdp::has_hooks::<Block>();
};
impl Block {
    pub fn forward(
        &self,
        __fsdp_0: (Tensor<3>, f64),
        mask: Option<Tensor<3>>,
    ) -> Tensor<3> {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, ProbeOther as _, ProbeUnitValue as _, ProbeSavable as _,
            ProbeUnsavable as _,
        };
        let (__fsdp_call, __fsdp_cast) = __fsdp::pre_forward_with_tables(
            self,
            |__fsdp_inputs| {
                (&__fsdp::ValueProbe(&__fsdp_0)).collect(__fsdp_inputs);
                (&__fsdp::ValueProbe(&mask)).collect(__fsdp_inputs);
            },
        );
        let __fsdp_self = ::core::option::Option::as_ref(&__fsdp_cast).unwrap_or(self);
        let __fsdp_0 = (&__fsdp::ValueProbe(&__fsdp_0))
            .kind()
            .map(&__fsdp_call, __fsdp_0);
        let mask = (&__fsdp::ValueProbe(&mask)).kind().map(&__fsdp_call, mask);
        let __fsdp_inputs = (__fsdp::ByValue(__fsdp_0), (__fsdp::ByValue(mask), ()));
        let (
            (__fsdp::ByValue(__fsdp_0), (__fsdp::ByValue(mask), ())),
            __fsdp_recompute,
        ) = (&__fsdp::ValueProbe(&__fsdp_inputs))
            .savability()
            .keep(
                &__fsdp_call,
                __fsdp_self,
                __fsdp_inputs,
                |
                    __fsdp_self: &Self,
                    (__fsdp::ByValue(__fsdp_0), (__fsdp::ByValue(mask), ()))|
                __fsdp_self.__fsdp_forward(__fsdp_0, mask),
            );
        let __fsdp_output = __fsdp::run(
            &__fsdp_call,
            || __fsdp_self.__fsdp_forward(__fsdp_0, mask),
        );
        __fsdp::post_forward_recompute(__fsdp_call, __fsdp_output, __fsdp_recompute)
    }
    #[doc(hidden)]
    fn __fsdp_forward(
        &self,
        (x, scale): (Tensor<3>, f64),
        mask: Option<Tensor<3>>,
    ) -> Tensor<3> {
        self.up.forward(x) * scale + mask.unwrap_or_default()
    }
    pub fn forward_tables(&self, x: Tensor<3>, tables: &Tables) -> Tensor<3> {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, ProbeOther as _, ProbeUnitValue as _, ReferenceModule as _,
            ReferenceOther as _, ReferenceTables as _, ReferenceTensors as _,
            ProbeSavable as _, ProbeUnsavable as _,
        };
        let (__fsdp_call, __fsdp_cast) = __fsdp::pre_forward_with_tables(
            self,
            |__fsdp_inputs| {
                (&__fsdp::ValueProbe(&x)).collect(__fsdp_inputs);
                (&&&&__fsdp::ReferenceProbe(tables))
                    .kind()
                    .collect(tables, __fsdp_inputs);
            },
        );
        let __fsdp_self = ::core::option::Option::as_ref(&__fsdp_cast).unwrap_or(self);
        let x = (&__fsdp::ValueProbe(&x)).kind().map(&__fsdp_call, x);
        let tables = (&&&&__fsdp::ReferenceProbe(tables))
            .kind()
            .map(&__fsdp_call, tables);
        let __fsdp_inputs = (__fsdp::ByValue(x), (tables, ()));
        let ((__fsdp::ByValue(x), (tables, ())), __fsdp_recompute) = (&__fsdp::ValueProbe(
            &__fsdp_inputs,
        ))
            .savability()
            .keep(
                &__fsdp_call,
                __fsdp_self,
                __fsdp_inputs,
                |__fsdp_self: &Self, (__fsdp::ByValue(x), (tables, ()))| {
                    __fsdp_self.__fsdp_forward_tables(x, tables.get())
                },
            );
        let __fsdp_output = __fsdp::run(
            &__fsdp_call,
            || __fsdp_self.__fsdp_forward_tables(x, tables.get()),
        );
        __fsdp::post_forward_recompute(__fsdp_call, __fsdp_output, __fsdp_recompute)
    }
    #[doc(hidden)]
    fn __fsdp_forward_tables(&self, x: Tensor<3>, tables: &Tables) -> Tensor<3> {
        self.up.forward(x) + tables.offset.clone()
    }
    pub fn forward_named(&self, x: Tensor<3>, tables: &Tables) -> (Tensor<3>, &str) {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, ProbeOther as _, ProbeUnitValue as _, ReferenceModule as _,
            ReferenceOther as _, ReferenceTables as _, ReferenceTensors as _,
        };
        let __fsdp_call = __fsdp::pre_forward(
            self,
            |__fsdp_inputs| {
                (&__fsdp::ValueProbe(&x)).collect(__fsdp_inputs);
                (&&&&__fsdp::ReferenceProbe(tables))
                    .kind()
                    .collect(tables, __fsdp_inputs);
            },
        );
        let x = (&__fsdp::ValueProbe(&x)).kind().map(&__fsdp_call, x);
        let tables = (&&&&__fsdp::ReferenceProbe(tables))
            .kind()
            .map(&__fsdp_call, tables);
        let __fsdp_output = self.__fsdp_forward_named(x, tables.get());
        __fsdp::post_forward(__fsdp_call, __fsdp_output)
    }
    #[doc(hidden)]
    fn __fsdp_forward_named(&self, x: Tensor<3>, tables: &Tables) -> (Tensor<3>, &str) {
        (self.up.forward(x) + tables.offset.clone(), "up")
    }
    #[cfg(feature = "generation")]
    pub unsafe fn forward_step(&self) -> Output {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, ProbeOther as _, ProbeUnitValue as _, ProbeSavable as _,
            ProbeUnsavable as _,
        };
        let (__fsdp_call, __fsdp_cast) = __fsdp::pre_forward_with_tables(
            self,
            |__fsdp_inputs| {},
        );
        let __fsdp_self = ::core::option::Option::as_ref(&__fsdp_cast).unwrap_or(self);
        let __fsdp_inputs = ();
        let ((), __fsdp_recompute) = (&__fsdp::ValueProbe(&__fsdp_inputs))
            .savability()
            .keep(
                &__fsdp_call,
                __fsdp_self,
                __fsdp_inputs,
                |__fsdp_self: &Self, ()| unsafe { __fsdp_self.__fsdp_forward_step() },
            );
        let __fsdp_output = __fsdp::run(
            &__fsdp_call,
            || unsafe { __fsdp_self.__fsdp_forward_step() },
        );
        __fsdp::post_forward_recompute(__fsdp_call, __fsdp_output, __fsdp_recompute)
    }
    #[cfg(feature = "generation")]
    #[doc(hidden)]
    unsafe fn __fsdp_forward_step(&self) -> Output {
        Output
    }
    pub fn forward_cached(&self, x: Tensor<3>, cache: &mut Cache<'_>) -> Tensor<3> {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, ProbeOther as _, ProbeUnitValue as _,
        };
        let (__fsdp_call, __fsdp_cast) = __fsdp::pre_forward_with_tables(
            self,
            |__fsdp_inputs| {
                (&__fsdp::ValueProbe(&x)).collect(__fsdp_inputs);
                (&__fsdp::ValueProbe(&cache)).collect(__fsdp_inputs);
            },
        );
        let __fsdp_self = ::core::option::Option::as_ref(&__fsdp_cast).unwrap_or(self);
        let x = (&__fsdp::ValueProbe(&x)).kind().map(&__fsdp_call, x);
        let cache = (&__fsdp::ValueProbe(&cache)).kind().map(&__fsdp_call, cache);
        let __fsdp_output = __fsdp::run(
            &__fsdp_call,
            || __fsdp_self.__fsdp_forward_cached(x, cache),
        );
        __fsdp::post_forward(__fsdp_call, __fsdp_output)
    }
    #[doc(hidden)]
    fn __fsdp_forward_cached(&self, x: Tensor<3>, cache: &mut Cache<'_>) -> Tensor<3> {
        cache.push(self.up.forward(x))
    }
    pub fn forward_any<const N: usize>(&self, x: Tensor<3>) -> Tensor<3> {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, ProbeOther as _, ProbeUnitValue as _,
        };
        let (__fsdp_call, __fsdp_cast) = __fsdp::pre_forward_with_tables(
            self,
            |__fsdp_inputs| {
                (&__fsdp::ValueProbe(&x)).collect(__fsdp_inputs);
            },
        );
        let __fsdp_self = ::core::option::Option::as_ref(&__fsdp_cast).unwrap_or(self);
        let x = (&__fsdp::ValueProbe(&x)).kind().map(&__fsdp_call, x);
        let __fsdp_output = __fsdp::run(
            &__fsdp_call,
            || __fsdp_self.__fsdp_forward_any::<N>(x),
        );
        __fsdp::post_forward(__fsdp_call, __fsdp_output)
    }
    #[doc(hidden)]
    fn __fsdp_forward_any<const N: usize>(&self, x: Tensor<3>) -> Tensor<3> {
        self.up.forward(x)
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
                        ("input 1", __fsdp::Probe::<(Tensor<3>, f64)>::NOT_RECOMPUTABLE),
                        ("mask", __fsdp::Probe::<Option<Tensor<3>>>::NOT_RECOMPUTABLE),
                    ],
                },
                __fsdp::Forward {
                    name: "forward_tables",
                    inputs: &[
                        ("x", __fsdp::Probe::<Tensor<3>>::NOT_RECOMPUTABLE),
                        (
                            "tables",
                            __fsdp::not_kept(
                                __fsdp::Probe::<Tables>::CAN_BE_CLONED,
                                __fsdp::Probe::<Tables>::LAYOUT,
                            ),
                        ),
                    ],
                },
                __fsdp::Forward {
                    name: "forward_named",
                    inputs: &[
                        ("x", __fsdp::Probe::<Tensor<3>>::NOT_RECOMPUTABLE),
                        (
                            "tables",
                            __fsdp::not_kept(
                                __fsdp::Probe::<Tables>::CAN_BE_CLONED,
                                __fsdp::Probe::<Tables>::LAYOUT,
                            ),
                        ),
                        (
                            "the return value",
                            ::core::option::Option::Some(__fsdp::NotRecomputable::Output),
                        ),
                    ],
                },
                #[cfg(feature = "generation")]
                __fsdp::Forward {
                    name: "forward_step",
                    inputs: &[],
                },
                __fsdp::Forward {
                    name: "forward_cached",
                    inputs: &[
                        ("x", __fsdp::Probe::<Tensor<3>>::NOT_RECOMPUTABLE),
                        (
                            "cache",
                            ::core::option::Option::Some(
                                __fsdp::NotRecomputable::Borrowed,
                            ),
                        ),
                    ],
                },
                __fsdp::Forward {
                    name: "forward_any",
                    inputs: &[
                        ("x", __fsdp::Probe::<Tensor<3>>::NOT_RECOMPUTABLE),
                        (
                            "N",
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
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward", "input 1");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward", "mask");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_tables", "x");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_tables", "tables");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_named", "x");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_named", "tables");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_named", "the return value");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_cached", "x");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_cached", "cache");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_any", "x");
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward_any", "N");
};
