#[derive(Module, Debug)]
#[fsdp_unit(rot, tie("embedings" = "decoder"))]
pub struct Model {
    embeddings: Embeddings,
    #[fsdp(key = 3)]
    decoder: Linear,
}
