//! Valid inputs of each reader, to begin with.

/// Returns the seeds of a target.
pub fn of(target: &str) -> Vec<Vec<u8>> {
    let torch: [&[u8]; 3] = [
        include_bytes!("../torch/pytorch_model.bin"),
        include_bytes!("../torch/training.pt"),
        include_bytes!("../torch/attack.bin"),
    ];
    match target {
        "manifest" => vec![include_bytes!("../manifests/two_ranks.json").to_vec()],
        "rank_file" | "safetensors" => vec![safetensors()],
        "weights_index" => texts(&[
            r#"{"metadata": {"total_size": 12}, "weight_map": {"a.w": "model-00001-of-00002.safetensors", "b": "x.bin"}}"#,
            r#"{"weight_map": {}}"#,
        ]),
        "burn_record" => vec![record()],
        "torch_file" => torch.map(<[u8]>::to_vec).to_vec(),
        "distributed_checkpoint" => vec![checkpoint()],
        "peft_config" => texts(&[
            r#"{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q", "v"], "modules_to_save": null, "bias": "none"}"#,
            r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 0.5, "target_modules": "all-linear", "rank_pattern": {}}"#,
        ]),
        "yaml_config" | "yaml_update" => texts(&[
            include_str!("../support/accelerate.yaml"),
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\nmixed_precision: bf16\nnum_processes: 4\n",
        ]),
        "trainer_config" => texts(&[
            r#"{"transformer_layer_cls_to_wrap": ["BertLayer"], "backward_prefetch": "backward_pre", "forward_prefetch": false}"#,
            r#"{"fsdp_version": 2, "activation_checkpointing": true}"#,
        ]),
        "config_variable" => {
            texts(&[r#"{"mixed_precision": "bf16", "fsdp_offload_params": "true"}"#])
        }
        "launcher_environment" => texts(&[
            "RANK=1\nWORLD_SIZE=2\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nMASTER_ADDR=127.0.0.1\nMASTER_PORT=29500\n",
            "OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=3\nOMPI_COMM_WORLD_LOCAL_RANK=0\nOMPI_COMM_WORLD_LOCAL_SIZE=3\n",
            "SLURM_PROCID=3\nSLURM_NTASKS=4\nSLURM_LOCALID=1\nSLURM_STEP_NUM_TASKS=4\nSLURM_STEP_TASKS_PER_NODE=2(x2)\n",
        ]),
        // Each kind of message: a length, then what postcard writes.
        "store_message" => vec![
            [&[0, 49][..], &[0; 3], b"\x01a", &[1; 32], b"\x05a run\x01\x02\x00", &[0; 5]].concat(),
            [&[1, 65, 0, 0, 0, 0][..], &[7; 64]].concat(),
            [&[2, 32, 0, 0, 0][..], &[7; 32]].concat(),
            vec![3, 1, 0, 0, 0, 0],
            [&[4, 13, 0, 0, 0][..], b"\x00\x00\x01a\x04unit\x01\x02\x01\x02"].concat(),
            [&[5, 6, 0, 0, 0][..], b"\x00\x02\x02\x01\x02\x00"].concat(),
            vec![6, 2, 0, 0, 0, 1, 7],
            vec![7, 4, 0, 0, 0, 2, 2, 1, 2],
        ],
        _ => Vec::new(),
    }
}

fn texts(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

/// Returns a file with tensors of several dtypes.
fn safetensors() -> Vec<u8> {
    let header = concat!(
        r#"{"__metadata__":{"format":"pt"},"a.w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"#,
        r#""b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},"c":{"dtype":"F64","shape":[],"data_offsets":[32,40]}}"#,
    );
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend(0..40);
    file
}

/// Returns the length of the metadata, the metadata, and the only file of a checkpoint.
fn checkpoint() -> Vec<u8> {
    let metadata = include_bytes!("../torch/one_rank/.metadata");
    let file = include_bytes!("../torch/one_rank/__0_0.distcp");
    [&(metadata.len() as u32).to_le_bytes()[..], metadata, file].concat()
}

/// Returns a Burn record of two tensors.
fn record() -> Vec<u8> {
    use burn::module::Module as _;
    let device = burn::tensor::Device::flex();
    let linear = burn::nn::LinearConfig::new(2, 3).init(&device);
    linear.into_record().into_bytes().expect("a record").to_vec()
}
