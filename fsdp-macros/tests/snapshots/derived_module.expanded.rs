#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("word.weight" = "position.weight"))]
pub struct Embeddings {
    #[fsdp(key = "word_embeddings")]
    word: Embedding,
    #[fsdp(key = "")]
    position: Positions,
    r#type: Option<Embedding>,
}
const _: () = {
    use ::fsdp_runtime::__private as __fsdp;
    trait __FsdpDerived
    where
        Embeddings: __fsdp::DerivesModule,
    {}
    impl __fsdp::FsdpModule for Embeddings {
        const LAYOUT: __fsdp::Node = __fsdp::Node {
            ty: "Embeddings",
            kind: __fsdp::Kind::Module,
            children: &[
                __fsdp::Child {
                    name: "word",
                    key: ::core::option::Option::Some("word_embeddings"),
                    transposed: false,
                    unit: false,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Embedding as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "position",
                    key: ::core::option::Option::Some(""),
                    transposed: false,
                    unit: false,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Positions as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "r#type",
                    key: ::core::option::Option::Some("type"),
                    transposed: false,
                    unit: false,
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Option<Embedding> as __fsdp::FsdpModule>::LAYOUT,
                },
            ],
            ties: &[
                __fsdp::Tie {
                    first: "word.weight",
                    second: "position.weight",
                    if_shared: false,
                },
            ],
        };
        fn visit_params<__V: __fsdp::ParamVisitor>(&self, __fsdp_visitor: &mut __V) {
            let __fsdp_children = Self::LAYOUT.children;
            <Embedding as __fsdp::FsdpModule>::visit_field(
                &self.word,
                &__fsdp_children[0],
                __fsdp_visitor,
            );
            <Positions as __fsdp::FsdpModule>::visit_field(
                &self.position,
                &__fsdp_children[1],
                __fsdp_visitor,
            );
            <Option<
                Embedding,
            > as __fsdp::FsdpModule>::visit_field(
                &self.r#type,
                &__fsdp_children[2],
                __fsdp_visitor,
            );
        }
        fn map_params<__M: __fsdp::ParamMapper>(self, __fsdp_mapper: &mut __M) -> Self {
            let __fsdp_children = Self::LAYOUT.children;
            Self {
                word: <Embedding as __fsdp::FsdpModule>::map_field(
                    self.word,
                    &__fsdp_children[0],
                    __fsdp_mapper,
                ),
                position: <Positions as __fsdp::FsdpModule>::map_field(
                    self.position,
                    &__fsdp_children[1],
                    __fsdp_mapper,
                ),
                r#type: <Option<
                    Embedding,
                > as __fsdp::FsdpModule>::map_field(
                    self.r#type,
                    &__fsdp_children[2],
                    __fsdp_mapper,
                ),
            }
        }
    }
    const __FSDP_LAYOUT: &__fsdp::Node = &<Embeddings as __fsdp::FsdpModule>::LAYOUT;
    const _: () = __fsdp::have_distinct_keys::<
        { __fsdp::num_keys(__FSDP_LAYOUT) },
    >(__FSDP_LAYOUT);
    const _: () = __fsdp::leads_to_a_weight(__FSDP_LAYOUT, "word.weight");
    const _: () = __fsdp::leads_to_a_weight(__FSDP_LAYOUT, "position.weight");
    const _: () = __fsdp::lie_in_one_unit(
        __FSDP_LAYOUT,
        "word.weight",
        "position.weight",
    );
    const _: () = __fsdp::are_split_alike(
        __FSDP_LAYOUT,
        "word.weight",
        "position.weight",
    );
};
#[derive(Module, FsdpModule, Debug)]
pub struct Pair(Linear, usize, #[fsdp(key = "second")] Linear);
const _: () = {
    use ::fsdp_runtime::__private as __fsdp;
    trait __FsdpDerived
    where
        Pair: __fsdp::DerivesModule,
    {}
    impl __fsdp::FsdpModule for Pair {
        const LAYOUT: __fsdp::Node = __fsdp::Node {
            ty: "Pair",
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
                __fsdp::Child {
                    name: "2",
                    key: ::core::option::Option::Some("second"),
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
            <Linear as __fsdp::FsdpModule>::visit_field(
                &self.2,
                &__fsdp_children[1],
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
                1: self.1,
                2: <Linear as __fsdp::FsdpModule>::map_field(
                    self.2,
                    &__fsdp_children[1],
                    __fsdp_mapper,
                ),
            }
        }
    }
    const __FSDP_LAYOUT: &__fsdp::Node = &<Pair as __fsdp::FsdpModule>::LAYOUT;
    const _: () = __fsdp::have_distinct_keys::<
        { __fsdp::num_keys(__FSDP_LAYOUT) },
    >(__FSDP_LAYOUT);
};
