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
    impl __fsdp::FsdpModule for Embeddings
    where
        Embeddings: __fsdp::DerivesModule,
    {
        const LAYOUT: __fsdp::Node = __fsdp::Node {
            ty: "Embeddings",
            kind: __fsdp::Kind::Module,
            children: &[
                __fsdp::Child {
                    name: "word",
                    key: ::core::option::Option::Some("word_embeddings"),
                    transposed: false,
                    node: &<Embedding as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "position",
                    key: ::core::option::Option::Some(""),
                    transposed: false,
                    node: &<Positions as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "r#type",
                    key: ::core::option::Option::Some("type"),
                    transposed: false,
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
            __fsdp::walk_field(&self.word, &__fsdp_children[0], __fsdp_walk);
            __fsdp::walk_field(&self.position, &__fsdp_children[1], __fsdp_walk);
            __fsdp::walk_field(&self.r#type, &__fsdp_children[2], __fsdp_walk);
        }
        fn attach<__A: __fsdp::Attach>(self, __fsdp_attach: &mut __A) -> Self {
            let __fsdp_children = Self::LAYOUT.children;
            Self {
                word: __fsdp::attach_field(
                    self.word,
                    &__fsdp_children[0],
                    __fsdp_attach,
                ),
                position: __fsdp::attach_field(
                    self.position,
                    &__fsdp_children[1],
                    __fsdp_attach,
                ),
                r#type: __fsdp::attach_field(
                    self.r#type,
                    &__fsdp_children[2],
                    __fsdp_attach,
                ),
            }
        }
    }
    const __FSDP_LAYOUT: &__fsdp::Node = &<Embeddings as __fsdp::FsdpModule>::LAYOUT;
    const _: () = __fsdp::check::keys::<
        { __fsdp::check::num_keys(__FSDP_LAYOUT) },
    >(__FSDP_LAYOUT);
    const _: () = __fsdp::check::tied(__FSDP_LAYOUT, "word.weight");
    const _: () = __fsdp::check::tied(__FSDP_LAYOUT, "position.weight");
    const _: () = __fsdp::check::tie(__FSDP_LAYOUT, "word.weight", "position.weight");
};
