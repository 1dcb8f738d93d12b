pub struct Block {
    up: Linear,
    down: Linear,
    gates: Vec<Gate>,
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
                __fsdp::Child {
                    name: "down",
                    key: ::core::option::Option::Some("output.dense"),
                    transposed: false,
                    unit: true,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Linear as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "gates",
                    key: ::core::option::Option::None,
                    transposed: false,
                    unit: true,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &__fsdp::LEAF,
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
            {
                use __fsdp::SingleUnit as _;
                __fsdp::LeafUnits(&self.gates)
                    .visit_units(&__fsdp_children[2], __fsdp_visitor);
            }
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
                gates: __fsdp::map_leaf_field(
                    self.gates,
                    &__fsdp_children[2],
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
    const _: () = {
        use __fsdp::Fallback as _;
        __fsdp::hides_no_unit(
            "gates",
            &[__fsdp::Probe::<Vec<Gate>>::LAYOUT, __fsdp::Probe::<Gate>::LAYOUT],
        )
    };
};
impl Block {
    pub fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
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
    fn __fsdp_forward(&self, x: Tensor<3>) -> Tensor<3> {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, CallElement as _, CallModule as _, CallOther as _,
            CallReference as _, ProbeOther as _, ProbeUnitValue as _,
        };
        x.clone()
            + (match (&&&&__fsdp::Receiver(&self.down)).field_call() {
                mut __fsdp_call => {
                    match self
                        .down
                        .forward(
                            match gelu(
                                (match (&&&&__fsdp::Receiver(&self.up)).field_call() {
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
                                }),
                            ) {
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
            })
    }
    fn gate(&self, x: Tensor<3>) -> Option<Tensor<3>> {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, CallElement as _, CallModule as _, CallOther as _,
            CallReference as _, ProbeOther as _, ProbeUnitValue as _,
        };
        Some(
            (match self.gates.first()? {
                __fsdp_receiver => {
                    match (&&&&__fsdp::Receiver(&__fsdp_receiver)).field_call() {
                        mut __fsdp_call => {
                            __fsdp_call
                                .input(|__fsdp_inputs| {
                                    (&__fsdp::ValueProbe(&x)).collect(__fsdp_inputs);
                                });
                            __fsdp_call.pre_forward();
                            match __fsdp_receiver
                                .forward(
                                    (&__fsdp::ValueProbe(&x)).kind().map(&__fsdp_call, x),
                                    None,
                                )
                            {
                                __fsdp_output => {
                                    (&__fsdp::ValueProbe(&__fsdp_output))
                                        .kind()
                                        .post_forward(__fsdp_call, __fsdp_output)
                                }
                            }
                        }
                    }
                }
            }),
        )
    }
    fn pass<T: Into<Tensor<3>> + UnitValue>(&self, x: T, y: T) -> Tensor<3> {
        #[allow(unused_imports)]
        use ::fsdp_runtime::__private::{
            self as __fsdp, CallElement as _, CallModule as _, CallOther as _,
            CallReference as _, ProbeOther as _, ProbeUnitValue as _,
        };
        let y = y.into();
        (match (&&&&__fsdp::Receiver(&self.down)).field_call() {
            mut __fsdp_call => {
                __fsdp_call
                    .input(|__fsdp_inputs| {
                        __fsdp::KnownTensors.collect(&x, __fsdp_inputs);
                    });
                __fsdp_call.pre_forward();
                match self.down.forward(__fsdp::KnownTensors.map(&__fsdp_call, x)) {
                    __fsdp_output => {
                        (&__fsdp::ValueProbe(&__fsdp_output))
                            .kind()
                            .post_forward(__fsdp_call, __fsdp_output)
                    }
                }
            }
        })
            + (match (&&&&__fsdp::Receiver(&self.down)).field_call() {
                mut __fsdp_call => {
                    __fsdp_call
                        .input(|__fsdp_inputs| {
                            (&__fsdp::ValueProbe(&y)).collect(__fsdp_inputs);
                        });
                    __fsdp_call.pre_forward();
                    match self
                        .down
                        .forward((&__fsdp::ValueProbe(&y)).kind().map(&__fsdp_call, y))
                    {
                        __fsdp_output => {
                            (&__fsdp::ValueProbe(&__fsdp_output))
                                .kind()
                                .post_forward(__fsdp_call, __fsdp_output)
                        }
                    }
                }
            })
    }
    fn width(&self) -> usize {
        self.width
    }
}
const _: () = {
    use ::fsdp_runtime::__private as __fsdp;
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
