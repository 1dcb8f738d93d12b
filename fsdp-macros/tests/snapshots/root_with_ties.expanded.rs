pub struct Model {
    embeddings: Embeddings,
    layers: Vec<Block>,
    decoder: Linear,
    head: Linear,
}
const _: () = {
    use ::fsdp_runtime::__private as __fsdp;
    trait __FsdpDerived
    where
        Model: __fsdp::DerivesModule,
    {}
    impl __fsdp::FsdpModule for Model {
        const LAYOUT: __fsdp::Node = __fsdp::Node {
            ty: "Model",
            kind: __fsdp::Kind::Unit { root: true },
            children: &[
                __fsdp::Child {
                    name: "embeddings",
                    key: ::core::option::Option::Some("bert.embeddings"),
                    transposed: false,
                    unit: false,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Embeddings as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "layers",
                    key: ::core::option::Option::Some("bert.encoder.layer"),
                    transposed: false,
                    unit: false,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Vec<Block> as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "decoder",
                    key: ::core::option::Option::Some("cls.predictions.decoder"),
                    transposed: false,
                    unit: false,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Linear as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "head",
                    key: ::core::option::Option::None,
                    transposed: false,
                    unit: false,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Linear as __fsdp::FsdpModule>::LAYOUT,
                },
            ],
            ties: &[
                __fsdp::Tie {
                    first: "embeddings.word",
                    second: "decoder",
                    if_shared: false,
                },
                __fsdp::Tie {
                    first: "head",
                    second: "decoder",
                    if_shared: true,
                },
            ],
        };
        fn visit_params<__V: __fsdp::ParamVisitor>(&self, __fsdp_visitor: &mut __V) {
            let __fsdp_children = Self::LAYOUT.children;
            <Embeddings as __fsdp::FsdpModule>::visit_field(
                &self.embeddings,
                &__fsdp_children[0],
                __fsdp_visitor,
            );
            <Vec<
                Block,
            > as __fsdp::FsdpModule>::visit_field(
                &self.layers,
                &__fsdp_children[1],
                __fsdp_visitor,
            );
            <Linear as __fsdp::FsdpModule>::visit_field(
                &self.decoder,
                &__fsdp_children[2],
                __fsdp_visitor,
            );
            <Linear as __fsdp::FsdpModule>::visit_field(
                &self.head,
                &__fsdp_children[3],
                __fsdp_visitor,
            );
        }
        fn map_params<__M: __fsdp::ParamMapper>(self, __fsdp_mapper: &mut __M) -> Self {
            let __fsdp_children = Self::LAYOUT.children;
            Self {
                embeddings: <Embeddings as __fsdp::FsdpModule>::map_field(
                    self.embeddings,
                    &__fsdp_children[0],
                    __fsdp_mapper,
                ),
                layers: <Vec<
                    Block,
                > as __fsdp::FsdpModule>::map_field(
                    self.layers,
                    &__fsdp_children[1],
                    __fsdp_mapper,
                ),
                decoder: <Linear as __fsdp::FsdpModule>::map_field(
                    self.decoder,
                    &__fsdp_children[2],
                    __fsdp_mapper,
                ),
                head: <Linear as __fsdp::FsdpModule>::map_field(
                    self.head,
                    &__fsdp_children[3],
                    __fsdp_mapper,
                ),
            }
        }
        const FORWARDS: &'static [__fsdp::Forward] = {
            use __fsdp::Fallback as _;
            __fsdp::Probe::<Model>::HOOKED
        };
    }
    impl __fsdp::FsdpUnit for Model {}
    const __FSDP_LAYOUT: &__fsdp::Node = &<Model as __fsdp::FsdpModule>::LAYOUT;
    const _: () = __fsdp::have_distinct_keys::<
        { __fsdp::num_keys(__FSDP_LAYOUT) },
    >(__FSDP_LAYOUT);
    const _: () = __fsdp::is_a_sound_unit(__FSDP_LAYOUT);
    const _: () = __fsdp::has_hooks::<Model>();
    const _: () = __fsdp::leads_to_a_weight(__FSDP_LAYOUT, "embeddings.word");
    const _: () = __fsdp::leads_to_a_weight(__FSDP_LAYOUT, "decoder");
    const _: () = __fsdp::lie_in_one_unit(__FSDP_LAYOUT, "embeddings.word", "decoder");
    const _: () = __fsdp::are_split_alike(__FSDP_LAYOUT, "embeddings.word", "decoder");
    const _: () = __fsdp::leads_to_a_weight(__FSDP_LAYOUT, "head");
    const _: () = __fsdp::leads_to_a_weight(__FSDP_LAYOUT, "decoder");
    const _: () = __fsdp::lie_in_one_unit(__FSDP_LAYOUT, "head", "decoder");
    const _: () = __fsdp::are_split_alike(__FSDP_LAYOUT, "head", "decoder");
};
