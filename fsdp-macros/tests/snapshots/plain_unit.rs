#[derive(Module, Debug)]
#[fsdp_unit]
pub struct Block {
    attention: Attention,
    #[fsdp(key = "intermediate.dense")]
    up: Linear,
    #[fsdp(key = "output.dense")]
    down: Linear,
    #[fsdp(leaf)]
    gate: vendor::Gate,
    dropout: f64,
    #[module(skip)]
    cache: Cache,
}
