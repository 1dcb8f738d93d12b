//! Plans of a module, as the program makes them, and of a folder, as `fsdp plan` makes them, agree.

use std::path::Path;

use clap::Parser;
use fsdp_runtime::options::ActivationCheckpointing;
use fsdp_runtime::plan::{Cluster, ModelShape, StepPlan};
use fsdp_runtime::{FsdpOptions, Mesh, Rank, WorldSize};
use serde_json::{Map, Value, json};

use crate::cli::Cli;
use crate::config::ModelConfig;
use crate::plan::Planned;
use crate::sharding;

/// Settings of a small model with grouped queries, of the shape of SmolLM2.
fn config(changes: &Value) -> Value {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 288,
        "intermediate_size": 768,
        "max_position_embeddings": 1024,
        "num_attention_heads": 9,
        "num_hidden_layers": 6,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": true,
        "vocab_size": 4096,
    });
    let own = config.as_object_mut().unwrap();
    own.extend(changes.as_object().unwrap().clone());
    config
}

/// Writes a folder with the settings and the header of the weights. A plan reads no more.
fn write_folder(folder: &Path, settings: &Value) -> ModelConfig {
    std::fs::write(folder.join("config.json"), settings.to_string()).unwrap();
    let config = ModelConfig::read(folder).unwrap();
    let (hidden, wide) = (config.hidden_size, config.intermediate_size);
    let queries = config.num_attention_heads * config.head_dim;
    let keys = config.num_key_value_heads * config.head_dim;
    let mut tensors = vec![
        ("model.embed_tokens.weight".to_string(), vec![config.vocab_size, hidden]),
        ("model.norm.weight".to_string(), vec![hidden]),
    ];
    if !config.tie_word_embeddings {
        tensors.push(("lm_head.weight".to_string(), vec![config.vocab_size, hidden]));
    }
    for layer in 0..config.num_hidden_layers {
        let shapes = [
            ("self_attn.q_proj", vec![queries, hidden]),
            ("self_attn.k_proj", vec![keys, hidden]),
            ("self_attn.v_proj", vec![keys, hidden]),
            ("self_attn.o_proj", vec![hidden, queries]),
            ("mlp.gate_proj", vec![wide, hidden]),
            ("mlp.up_proj", vec![wide, hidden]),
            ("mlp.down_proj", vec![hidden, wide]),
            ("input_layernorm", vec![hidden]),
            ("post_attention_layernorm", vec![hidden]),
        ];
        let head_norms =
            ["self_attn.q_norm", "self_attn.k_norm"].map(|it| (it, vec![config.head_dim]));
        let head_norms = head_norms.into_iter().filter(|_| config.has_head_norms());
        let named = |(name, shape)| (format!("model.layers.{layer}.{name}.weight"), shape);
        tensors.extend(shapes.into_iter().chain(head_norms).map(named));
    }
    let mut begin = 0;
    let entry = |(name, shape): (String, Vec<usize>)| {
        let end = begin + 4 * shape.iter().product::<usize>();
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [begin, end] });
        begin = end;
        (name, entry)
    };
    let header = Value::Object(tensors.into_iter().map(entry).collect::<Map<_, _>>()).to_string();
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
    config
}

#[test]
fn a_folder_has_the_memory_of_its_module() {
    let cluster = Cluster::preset("h100").unwrap();
    for changes in [
        json!({}),
        json!({ "tie_word_embeddings": false, "num_key_value_heads": 9 }),
        json!({ "model_type": "qwen3", "head_dim": 64 }),
    ] {
        for flags in ["", "--lora 8", "--lora 8 --quantize nf4", "--bf16 --recompute"] {
            let folder = tempfile::tempdir().unwrap();
            let config = write_folder(folder.path(), &config(&changes));
            // The parser wants a model where adapters are asked for.
            let base = format!("llm_finetune --device flex --max-length 256 --model . {flags}");
            let cli = Cli::parse_from(base.split_whitespace());
            let settings = cli.launch_settings().unwrap();
            let planned = Planned::new(config, &cli, &settings).unwrap();
            let mut shape = ModelShape::from_folder(folder.path()).unwrap();
            let lora = cli.lora.resolve(&[]).unwrap();
            if lora.is_some() {
                shape = shape.with_lora(8);
            }
            let mut options: FsdpOptions = sharding::options(&cli, &settings, lora.as_ref());
            if cli.recompute {
                // A folder has layers without the names of types.
                options = options.with_activation_checkpointing(ActivationCheckpointing::All);
            }
            for world in [1, 2, 8] {
                let mesh = Mesh::new(Rank::ZERO, WorldSize::new(world).unwrap());
                let of_module = planned.step(mesh).unwrap();
                let of_folder = StepPlan::of_shape(&shape, mesh, &options).unwrap();
                let of_folder = of_folder.with_fused_loss(true);
                let memory =
                    |plan: &StepPlan| plan.estimate(planned.batch, &cluster).memory.total() as f64;
                let ratio = memory(&of_folder) / memory(&of_module);
                assert!((ratio - 1.0).abs() < 0.03, "{changes} {flags} {world}: {ratio}");
                let operations = |plan: &StepPlan| -> f64 {
                    plan.work(planned.batch).iter().map(|unit| unit.products).sum()
                };
                let ratio = operations(&of_folder) / operations(&of_module);
                assert!((ratio - 1.0).abs() < 0.01, "{changes} {flags} {world}: {ratio}");
            }
        }
    }
}
