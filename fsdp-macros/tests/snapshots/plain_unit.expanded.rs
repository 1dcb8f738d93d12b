pub struct Block {
    attention: Attention,
    up: Linear,
    down: Linear,
    gate: vendor::Gate,
    dropout: f64,
    #[module(skip)]
    cache: Cache,
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
                    name: "attention",
                    key: ::core::option::Option::None,
                    transposed: false,
                    unit: false,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Attention as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "up",
                    key: ::core::option::Option::Some("intermediate.dense"),
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
                    unit: false,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Linear as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "gate",
                    key: ::core::option::Option::None,
                    transposed: false,
                    unit: false,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &__fsdp::LEAF,
                },
            ],
            ties: &[],
        };
        fn visit_params<__V: __fsdp::ParamVisitor>(&self, __fsdp_visitor: &mut __V) {
            let __fsdp_children = Self::LAYOUT.children;
            <Attention as __fsdp::FsdpModule>::visit_field(
                &self.attention,
                &__fsdp_children[0],
                __fsdp_visitor,
            );
            <Linear as __fsdp::FsdpModule>::visit_field(
                &self.up,
                &__fsdp_children[1],
                __fsdp_visitor,
            );
            <Linear as __fsdp::FsdpModule>::visit_field(
                &self.down,
                &__fsdp_children[2],
                __fsdp_visitor,
            );
            __fsdp::visit_leaf_field(&self.gate, &__fsdp_children[3], __fsdp_visitor);
        }
        fn map_params<__M: __fsdp::ParamMapper>(self, __fsdp_mapper: &mut __M) -> Self {
            let __fsdp_children = Self::LAYOUT.children;
            Self {
                attention: <Attention as __fsdp::FsdpModule>::map_field(
                    self.attention,
                    &__fsdp_children[0],
                    __fsdp_mapper,
                ),
                up: <Linear as __fsdp::FsdpModule>::map_field(
                    self.up,
                    &__fsdp_children[1],
                    __fsdp_mapper,
                ),
                down: <Linear as __fsdp::FsdpModule>::map_field(
                    self.down,
                    &__fsdp_children[2],
                    __fsdp_mapper,
                ),
                gate: __fsdp::map_leaf_field(
                    self.gate,
                    &__fsdp_children[3],
                    __fsdp_mapper,
                ),
                dropout: self.dropout,
                cache: self.cache,
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
        __fsdp::hides_no_unit("gate", &[__fsdp::Probe::<vendor::Gate>::LAYOUT])
    };
    const _: () = {
        use __fsdp::Fallback as _;
        __fsdp::skips_no_unit("cache", &[__fsdp::Probe::<Cache>::LAYOUT])
    };
};
