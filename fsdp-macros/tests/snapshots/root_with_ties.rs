#[derive(Module, Debug)]
#[fsdp_unit(root, tie("embeddings.word" = "decoder"), tie("head" = "decoder", if_shared))]
pub struct Model {
    #[fsdp(key = "bert.embeddings")]
    embeddings: Embeddings,
    #[fsdp(key = "bert.encoder.layer")]
    layers: Vec<Block>,
    #[fsdp(key = "cls.predictions.decoder")]
    decoder: Linear,
    head: Linear,
}
