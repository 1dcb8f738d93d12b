pub struct Block {
    up: Linear,
    down: Linear,
}
const _: () = {
    use crate::training::fsdp::__private as __fsdp;
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
                __fsdp::Child {
                    name: "down",
                    key: ::core::option::Option::None,
                    transposed: false,
                    unit: true,
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
            <Linear as __fsdp::FsdpModule>::visit_field(
                &self.down,
                &__fsdp_children[1],
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
                down: <Linear as __fsdp::FsdpModule>::map_field(
                    self.down,
                    &__fsdp_children[1],
                    __fsdp_mapper,
                ),
            }
        }
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
    const _: () = {
        use __fsdp::Fallback as _;
        __fsdp::can_be_a_unit("down", __fsdp::Probe::<Linear>::LAYOUT)
    };
};
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Output {
        #[allow(unused_imports)]
        use crate::training::fsdp::__private::{
            self as __fsdp, ProbeOther as _, ProbeUnitValue as _, ProbeSavable as _,
            ProbeUnsavable as _,
        };
        let (__fsdp_call, __fsdp_cast) = __fsdp::pre_forward_with_tables(
            self,
            |__fsdp_inputs| {
                (&__fsdp::ValueProbe(&x)).collect(__fsdp_inputs);
            },
        );
        let __fsdp_self = ::core::option::Option::as_ref(&__fsdp_cast).unwrap_or(self);
        let x = (&__fsdp::ValueProbe(&x)).kind().map(&__fsdp_call, x);
        let __fsdp_inputs = (__fsdp::ByValue(x), ());
        let ((__fsdp::ByValue(x), ()), __fsdp_recompute) = (&__fsdp::ValueProbe(
            &__fsdp_inputs,
        ))
            .savability()
            .keep(
                &__fsdp_call,
                __fsdp_self,
                __fsdp_inputs,
                |__fsdp_self: &Self, (__fsdp::ByValue(x), ())| {
                    __fsdp_self.__fsdp_forward(x)
                },
            );
        let __fsdp_output = __fsdp::run(&__fsdp_call, || __fsdp_self.__fsdp_forward(x));
        __fsdp::post_forward_recompute(__fsdp_call, __fsdp_output, __fsdp_recompute)
    }
    #[doc(hidden)]
    fn __fsdp_forward(&self, x: Tensor<3>) -> Output {
        #[allow(unused_imports)]
        use crate::training::fsdp::__private::{
            self as __fsdp, CallElement as _, CallModule as _, CallOther as _,
            CallReference as _, ProbeOther as _, ProbeUnitValue as _,
        };
        Output(
            (match (&&&&__fsdp::Receiver(&self.down)).field_call() {
                mut __fsdp_call => {
                    match self
                        .down
                        .forward(
                            match (match (&&&&__fsdp::Receiver(&self.up)).field_call() {
                                mut __fsdp_call => {
                                    __fsdp_call
                                        .input(|__fsdp_inputs| {
                                            (&__fsdp::ValueProbe(&x)).collect(__fsdp_inputs);
                                        });
                                    __fsdp_call.pre_forward();
                                    match self
                                        .up
                                        .forward(
                                            (&__fsdp::ValueProbe(&x)).kind().map(&__fsdp_call, x),
                                        )
                                    {
                                        __fsdp_output => {
                                            (&__fsdp::ValueProbe(&__fsdp_output))
                                                .kind()
                                                .post_forward(__fsdp_call, __fsdp_output)
                                        }
                                    }
                                }
                            }) {
                                __fsdp_argument => {
                                    __fsdp_call
                                        .input(|__fsdp_inputs| {
                                            (&__fsdp::ValueProbe(&__fsdp_argument))
                                                .collect(__fsdp_inputs);
                                        });
                                    __fsdp_call.pre_forward();
                                    (&__fsdp::ValueProbe(&__fsdp_argument))
                                        .kind()
                                        .map(&__fsdp_call, __fsdp_argument)
                                }
                            },
                        )
                    {
                        __fsdp_output => {
                            (&__fsdp::ValueProbe(&__fsdp_output))
                                .kind()
                                .post_forward(__fsdp_call, __fsdp_output)
                        }
                    }
                }
            }),
        )
    }
}
const _: () = {
    use crate::training::fsdp::__private as __fsdp;
    impl __fsdp::HookedForward for Block {
        const HOOKS_FIELD_UNITS: ::core::primitive::bool = true;
        const HOOKED: &'static [__fsdp::Forward] = {
            use __fsdp::Fallback as _;
            &[
                __fsdp::Forward {
                    name: "forward",
                    inputs: &[("x", __fsdp::Probe::<Tensor<3>>::NOT_RECOMPUTABLE)],
                },
            ]
        };
    }
    const _: () = __fsdp::can_be_recomputed::<
        Block,
    >(<Block as __fsdp::HookedForward>::HOOKED, "forward", "x");
};
#[derive(Module, FsdpModule, Debug)]
#[fsdp(crate = "crate::training::fsdp")]
pub struct Head(Linear);
const _: () = {
    use crate::training::fsdp::__private as __fsdp;
    trait __FsdpDerived
    where
        Head: __fsdp::DerivesModule,
    {}
    impl __fsdp::FsdpModule for Head {
        const LAYOUT: __fsdp::Node = __fsdp::Node {
            ty: "Head",
            kind: __fsdp::Kind::Module,
            children: &[
                __fsdp::Child {
                    name: "0",
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
                &self.0,
                &__fsdp_children[0],
                __fsdp_visitor,
            );
        }
        fn map_params<__M: __fsdp::ParamMapper>(self, __fsdp_mapper: &mut __M) -> Self {
            let __fsdp_children = Self::LAYOUT.children;
            Self {
                0: <Linear as __fsdp::FsdpModule>::map_field(
                    self.0,
                    &__fsdp_children[0],
                    __fsdp_mapper,
                ),
            }
        }
    }
    const __FSDP_LAYOUT: &__fsdp::Node = &<Head as __fsdp::FsdpModule>::LAYOUT;
    const _: () = __fsdp::have_distinct_keys::<
        { __fsdp::num_keys(__FSDP_LAYOUT) },
    >(__FSDP_LAYOUT);
};
#[derive(UnitValue)]
#[fsdp(crate = "crate::training::fsdp")]
pub struct Output(Tensor<3>);
const _: () = {
    use crate::training::fsdp::__private as __fsdp;
    impl __fsdp::UnitValue for Output {
        fn map_tensors(
            self,
            __fsdp_map: &mut dyn ::core::ops::FnMut(
                __fsdp::DispatchTensor,
            ) -> __fsdp::DispatchTensor,
        ) -> Self {
            match self {
                Self { 0: __fsdp_0 } => {
                    Self {
                        0: <Tensor<
                            3,
                        > as __fsdp::UnitValue>::map_tensors(__fsdp_0, __fsdp_map),
                    }
                }
            }
        }
        fn visit_tensors(
            &self,
            __fsdp_visit: &mut dyn ::core::ops::FnMut(__fsdp::DispatchTensor),
        ) {
            match *self {
                Self { 0: ref __fsdp_0 } => {
                    <Tensor<
                        3,
                    > as __fsdp::UnitValue>::visit_tensors(__fsdp_0, __fsdp_visit);
                }
            }
        }
    }
};
