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
                    node: &<Embedding as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "position",
                    key: ::core::option::Option::Some(""),
                    transposed: false,
                    unit: false,
                    node: &<Positions as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "r#type",
                    key: ::core::option::Option::Some("type"),
                    transposed: false,
                    unit: false,
                    node: &<Option<Embedding> as __fsdp::FsdpModule>::LAYOUT,
                },
            ],
            ties: &[
                __fsdp::Tie {
                    first: "word.weight",
                    second: "position.weight",
                },
            ],
        };
        fn walk<__W: __fsdp::Walk>(&self, __fsdp_walk: &mut __W) {
            let __fsdp_children = Self::LAYOUT.children;
            <Embedding as __fsdp::FsdpModule>::walk_field(
                &self.word,
                &__fsdp_children[0],
                __fsdp_walk,
            );
            <Positions as __fsdp::FsdpModule>::walk_field(
                &self.position,
                &__fsdp_children[1],
                __fsdp_walk,
            );
            <Option<
                Embedding,
            > as __fsdp::FsdpModule>::walk_field(
                &self.r#type,
                &__fsdp_children[2],
                __fsdp_walk,
            );
        }
        fn attach<__A: __fsdp::Attach>(self, __fsdp_attach: &mut __A) -> Self {
            let __fsdp_children = Self::LAYOUT.children;
            Self {
                word: <Embedding as __fsdp::FsdpModule>::attach_field(
                    self.word,
                    &__fsdp_children[0],
                    __fsdp_attach,
                ),
                position: <Positions as __fsdp::FsdpModule>::attach_field(
                    self.position,
                    &__fsdp_children[1],
                    __fsdp_attach,
                ),
                r#type: <Option<
                    Embedding,
                > as __fsdp::FsdpModule>::attach_field(
                    self.r#type,
                    &__fsdp_children[2],
                    __fsdp_attach,
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
                    node: &<Linear as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "2",
                    key: ::core::option::Option::Some("second"),
                    transposed: false,
                    unit: false,
                    node: &<Linear as __fsdp::FsdpModule>::LAYOUT,
                },
            ],
            ties: &[],
        };
        fn walk<__W: __fsdp::Walk>(&self, __fsdp_walk: &mut __W) {
            let __fsdp_children = Self::LAYOUT.children;
            <Linear as __fsdp::FsdpModule>::walk_field(
                &self.0,
                &__fsdp_children[0],
                __fsdp_walk,
            );
            <Linear as __fsdp::FsdpModule>::walk_field(
                &self.2,
                &__fsdp_children[1],
                __fsdp_walk,
            );
        }
        fn attach<__A: __fsdp::Attach>(self, __fsdp_attach: &mut __A) -> Self {
            let __fsdp_children = Self::LAYOUT.children;
            Self {
                0: <Linear as __fsdp::FsdpModule>::attach_field(
                    self.0,
                    &__fsdp_children[0],
                    __fsdp_attach,
                ),
                1: self.1,
                2: <Linear as __fsdp::FsdpModule>::attach_field(
                    self.2,
                    &__fsdp_children[1],
                    __fsdp_attach,
                ),
            }
        }
    }
    const __FSDP_LAYOUT: &__fsdp::Node = &<Pair as __fsdp::FsdpModule>::LAYOUT;
    const _: () = __fsdp::have_distinct_keys::<
        { __fsdp::num_keys(__FSDP_LAYOUT) },
    >(__FSDP_LAYOUT);
};
