pub struct Model {
    embeddings: Embeddings,
    layers: Vec<Block>,
    decoder: Linear,
}
const _: () = {
    use ::fsdp_runtime::__private as __fsdp;
    impl __fsdp::FsdpModule for Model
    where
        Model: __fsdp::DerivesModule,
    {
        const LAYOUT: __fsdp::Node = __fsdp::Node {
            ty: "Model",
            kind: __fsdp::Kind::Unit { root: true },
            children: &[
                __fsdp::Child {
                    name: "embeddings",
                    key: ::core::option::Option::Some("bert.embeddings"),
                    transposed: false,
                    node: &<Embeddings as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "layers",
                    key: ::core::option::Option::Some("bert.encoder.layer"),
                    transposed: false,
                    node: &<Vec<Block> as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "decoder",
                    key: ::core::option::Option::Some("cls.predictions.decoder"),
                    transposed: false,
                    node: &<Linear as __fsdp::FsdpModule>::LAYOUT,
                },
            ],
            ties: &[
                __fsdp::Tie {
                    first: "embeddings.word",
                    second: "decoder",
                },
            ],
        };
        fn walk<__W: __fsdp::Walk>(&self, __fsdp_walk: &mut __W) {
            let __fsdp_children = Self::LAYOUT.children;
            __fsdp::walk_field(&self.embeddings, &__fsdp_children[0], __fsdp_walk);
            __fsdp::walk_field(&self.layers, &__fsdp_children[1], __fsdp_walk);
            __fsdp::walk_field(&self.decoder, &__fsdp_children[2], __fsdp_walk);
        }
        fn attach<__A: __fsdp::Attach>(self, __fsdp_attach: &mut __A) -> Self {
            let __fsdp_children = Self::LAYOUT.children;
            Self {
                embeddings: __fsdp::attach_field(
                    self.embeddings,
                    &__fsdp_children[0],
                    __fsdp_attach,
                ),
                layers: __fsdp::attach_field(
                    self.layers,
                    &__fsdp_children[1],
                    __fsdp_attach,
                ),
                decoder: __fsdp::attach_field(
                    self.decoder,
                    &__fsdp_children[2],
                    __fsdp_attach,
                ),
            }
        }
    }
    impl __fsdp::FsdpUnit for Model
    where
        Model: __fsdp::DerivesModule,
    {}
    const __FSDP_LAYOUT: &__fsdp::Node = &<Model as __fsdp::FsdpModule>::LAYOUT;
    const _: () = __fsdp::check::keys::<
        { __fsdp::check::num_keys(__FSDP_LAYOUT) },
    >(__FSDP_LAYOUT);
    const _: () = __fsdp::check::unit(__FSDP_LAYOUT);
    const _: () = __fsdp::check::hooked::<Model>();
    const _: () = __fsdp::check::tied(__FSDP_LAYOUT, "embeddings.word");
    const _: () = __fsdp::check::tied(__FSDP_LAYOUT, "decoder");
    const _: () = __fsdp::check::tie(__FSDP_LAYOUT, "embeddings.word", "decoder");
};
