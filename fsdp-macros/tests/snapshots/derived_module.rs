#[derive(Module, FsdpModule, Debug)]
#[fsdp(tie("word.weight" = "position.weight"))]
pub struct Embeddings {
    #[fsdp(key = "word_embeddings")]
    word: Embedding,
    #[fsdp(key = "")]
    position: Positions,
    r#type: Option<Embedding>,
}

#[derive(Module, FsdpModule, Debug)]
pub struct Pair(Linear, usize, #[fsdp(key = "second")] Linear);
