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
                    group: ::core::option::Option::None,
                    split: ::core::option::Option::None,
                    node: &<Embeddings as __fsdp::FsdpModule>::LAYOUT,
                },
                __fsdp::Child {
                    name: "decoder",
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
                    first: "embedings",
                    second: "decoder",
                    if_shared: false,
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
            <Linear as __fsdp::FsdpModule>::visit_field(
                &self.decoder,
                &__fsdp_children[1],
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
                decoder: <Linear as __fsdp::FsdpModule>::map_field(
                    self.decoder,
                    &__fsdp_children[1],
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
