pub struct Model {
    embeddings: Embeddings,
    decoder: Linear,
}
const _: () = {
    use ::fsdp_runtime::__private as __fsdp;
    impl __fsdp::FsdpModule for Model {
        const LAYOUT: __fsdp::Node = __fsdp::Node {
            ty: "Model",
            kind: __fsdp::Kind::Unit { root: false },
            children: &[
                __fsdp::Child {
                    name: "embeddings",
                    key: ::core::option::Option::None,
                    transposed: false,
                    unit: false,
                    node: &<Embeddings as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "decoder",
                    key: ::core::option::Option::None,
                    transposed: false,
                    unit: false,
                    node: &<Linear as __fsdp::FsdpModule>::LAYOUT,
                },
            ],
            ties: &[
                __fsdp::Tie {
                    first: "embedings",
                    second: "decoder",
                },
            ],
        };
        fn walk<__W: __fsdp::Walk>(&self, __fsdp_walk: &mut __W) {
            let __fsdp_children = Self::LAYOUT.children;
            <Embeddings as __fsdp::FsdpModule>::walk_field(
                &self.embeddings,
                &__fsdp_children[0],
                __fsdp_walk,
            );
            <Linear as __fsdp::FsdpModule>::walk_field(
                &self.decoder,
                &__fsdp_children[1],
                __fsdp_walk,
            );
        }
        fn attach<__A: __fsdp::Attach>(self, __fsdp_attach: &mut __A) -> Self {
            let __fsdp_children = Self::LAYOUT.children;
            Self {
                embeddings: <Embeddings as __fsdp::FsdpModule>::attach_field(
                    self.embeddings,
                    &__fsdp_children[0],
                    __fsdp_attach,
                ),
                decoder: <Linear as __fsdp::FsdpModule>::attach_field(
                    self.decoder,
                    &__fsdp_children[1],
                    __fsdp_attach,
                ),
            }
        }
        const FORWARDS: &'static [__fsdp::Forward] = {
            use __fsdp::NotHooked as _;
            __fsdp::Probe::<Model>::HOOKED
        };
    }
    impl __fsdp::FsdpUnit for Model {}
};
::core::compile_error! {
    "unknown argument `rot`; did you mean `root`?"
}
::core::compile_error! {
    "a key is a string: write `key = \"name.in.checkpoint\"`"
}
::core::compile_error! {
    "`Model` has no field `embedings`; did you mean `embeddings`?"
}
