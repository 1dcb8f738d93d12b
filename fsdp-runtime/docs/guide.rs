#![doc = include_str!("links")]
#![doc = ""]
#![doc = include_str!("README.md")]

// This module exists in the documentation only. A chapter is a page of this folder. To add one: a
// line below, in `links` and in the table of `README.md`; `tests/guide/` of the workspace compares
// them.
//
// A link between pages is a reference, such as `[Checkpoints][checkpoints]`. Markdown uses the
// first definition of a reference: in rustdoc the one in `links`, in the file itself the one at its
// end.
//
// A chapter whose code needs a feature that is not a default one is left out of the doctests where
// the feature is off. Rustdoc has every chapter.

macro_rules! chapters {
    ($($(#[$gate:meta])? $name:ident: $page:literal),+ $(,)?) => {$(
        $(#[$gate])?
        #[doc = include_str!("links")]
        #[doc = ""]
        #[doc = include_str!($page)]
        pub mod $name {}
    )+};
}

chapters!(
    first_model: "first_model.md",
    mnist: "mnist.md",
    #[cfg(any(feature = "train", not(doctest)))]
    learner: "learner.md",
    from_pytorch: "from_pytorch.md",
    from_accelerate: "from_accelerate.md",
    strategies: "strategies.md",
    tensor_parallel: "tensor_parallel.md",
    context_parallel: "context_parallel.md",
    options: "options.md",
    mixed_precision: "mixed_precision.md",
    storage: "storage.md",
    lora: "lora.md",
    offload: "offload.md",
    activation_checkpointing: "activation_checkpointing.md",
    accumulation: "accumulation.md",
    layers: "layers.md",
    optimizers: "optimizers.md",
    checkpoints: "checkpoints.md",
    pretraining: "pretraining.md",
    llm_finetune: "llm_finetune.md",
    processes: "processes.md",
    launch: "launch.md",
    config: "config.md",
    plan: "plan.md",
    #[cfg(any(feature = "trace", not(doctest)))]
    trace: "trace.md",
    memory: "memory.md",
    security: "security.md",
    troubleshooting: "troubleshooting.md",
    limits: "limits.md",
    architecture: "architecture.md",
    expansion: "expansion.md",
    kernels: "kernels.md",
    performance: "performance.md",
    history: "history.md",
    gpu: "gpu.md",
);
