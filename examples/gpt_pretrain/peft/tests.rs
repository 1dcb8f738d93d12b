//! Tests without PEFT: adapters that are exported, imported and split.

use serde_json::Value;

use super::*;

fn random(rows: usize, columns: usize, seed: &mut u32) -> Matrix {
    let mut element = || {
        *seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (*seed >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    Matrix { columns, elements: (0..rows * columns).map(|_| element()).collect() }
}

fn adapter(rank: usize, inputs: usize, outputs: usize, seed: &mut u32) -> Adapter {
    Adapter { a: random(rank, inputs, seed), b: random(outputs, rank, seed) }
}

/// The product of the factors, times the scale, `[outputs, inputs]`.
fn product(adapter: &Adapter, scale: f64) -> Vec<f64> {
    let (a, inputs) = (&adapter.a, adapter.a.columns);
    let row = |b: &[f32]| {
        let mut sums = vec![0.0; inputs];
        for (b, a) in b.iter().zip(a.rows()) {
            sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += f64::from(b * a) * scale);
        }
        sums
    };
    adapter.b.rows().flat_map(row).collect()
}

fn config(rank: usize, alpha: f64) -> Value {
    json!({"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"})
}

fn saved(adapters: &BTreeMap<String, Adapter>, config: &Value) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), adapters, config).unwrap();
    folder
}

/// Three blocks, of which the last one's keys have no adapter.
fn here() -> BTreeMap<String, Adapter> {
    let mut seed = 1;
    let mut adapters = BTreeMap::new();
    for layer in 0..3 {
        let keys = (layer < 2).then_some("attention.key");
        for field in ["attention.query", "attention.value"].into_iter().chain(keys) {
            let name = format!("blocks.{layer}.{field}");
            adapters.insert(name, adapter(2, 6, 6, &mut seed));
        }
        let name = format!("blocks.{layer}.down");
        adapters.insert(name, adapter(2, 24, 6, &mut seed));
    }
    adapters
}

#[test]
fn exported_adapters_are_imported_to_the_bit() {
    let (adapters, target) = (here(), tempfile::tempdir().unwrap());
    export(saved(&adapters, &config(2, 3.0)).path(), target.path(), 3).unwrap();
    let (theirs, settings) = read(target.path()).unwrap();
    assert_eq!(theirs["transformer.h.0.attn.c_attn"].rank(), 6);
    assert_eq!(theirs["transformer.h.2.attn.c_attn"].rank(), 4);
    assert_eq!(theirs["transformer.h.2.mlp.c_proj"].rank(), 2);
    assert_eq!(settings["target_modules"], json!(["attn.c_attn", "mlp.c_proj"]));
    let back = import(target.path()).unwrap();
    let (found, settings) = read(back.path()).unwrap();
    assert_eq!(found, adapters);
    assert_eq!((&settings["r"], &settings["lora_alpha"]), (&json!(2), &json!(3.0)));
    assert_eq!(settings["target_modules"].as_array().unwrap().len(), adapters.len());
}

/// The product of an adapter of the model here is a part of that of the layer of GPT-2.
#[test]
fn adapters_of_any_ranks_and_scales_are_split() {
    let mut seed = 7;
    let mut theirs = BTreeMap::new();
    let mut attention = adapter(3, 6, 18, &mut seed);
    // Keys depend on nothing, and queries on the second row alone.
    attention.b.elements[6 * 3..12 * 3].fill(0.0);
    for row in attention.b.elements[..6 * 3].chunks_exact_mut(3) {
        (row[0], row[2]) = (0.0, 0.0);
    }
    theirs.insert("transformer.h.0.attn.c_attn".to_string(), attention);
    theirs.insert("transformer.h.0.mlp.c_fc".to_string(), adapter(2, 6, 24, &mut seed));
    let mut settings = config(3, 6.0);
    settings["rank_pattern"] = json!({"mlp.c_fc": 2});
    settings["alpha_pattern"] = json!({"mlp.c_fc": 3.0});
    let mut by_root = settings.clone();
    by_root["use_rslora"] = true.into();
    by_root["lora_alpha"] = json!(2.0 * 3f64.sqrt());
    by_root["alpha_pattern"] = json!({"mlp.c_fc": 1.5 * 2f64.sqrt()});
    for settings in [settings, by_root] {
        assert_split(&theirs, &settings);
    }
}

/// Asserts that adapters with the scales 2 of the attention and 1.5 of the feed-forward are split.
fn assert_split(theirs: &BTreeMap<String, Adapter>, settings: &Value) {
    let attention = &theirs["transformer.h.0.attn.c_attn"];
    let up = &theirs["transformer.h.0.mlp.c_fc"];
    let here = import(saved(theirs, settings).path()).unwrap();
    let (found, settings) = read(here.path()).unwrap();
    let names: Vec<_> = found.keys().map(String::as_str).collect();
    assert_eq!(names, ["blocks.0.attention.query", "blocks.0.attention.value", "blocks.0.up"]);
    assert!(found.values().all(|adapter| adapter.rank() == 3));
    let scale = Scales::new(&settings).unwrap().base;
    let whole = product(attention, 2.0);
    for (name, expected) in [
        ("blocks.0.attention.query", &whole[..36]),
        ("blocks.0.attention.value", &whole[72..]),
        ("blocks.0.up", &product(up, 1.5)),
    ] {
        let found = product(&found[name], scale);
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() < 1e-6, "{name}: {a} {b}");
        }
    }
    // Rows without columns can be trained on.
    let query = &found["blocks.0.attention.query"];
    assert!(query.a.rows().all(|row| row.iter().any(|element| *element != 0.0)));
}

#[test]
fn other_adapters_are_refused_with_the_reason() {
    let mut seed = 3;
    let mut refused = |name: &str, settings: &Value| {
        let adapters = BTreeMap::from([(name.to_string(), adapter(2, 4, 8, &mut seed))]);
        format!("{:#}", import(saved(&adapters, settings).path()).unwrap_err())
    };
    let settings = config(2, 4.0);
    for name in ["transformer.wte", "transformer.h.0.ln_1", "lm_head"] {
        let error = refused(name, &settings);
        assert!(error.contains(name) && error.contains("--adapters"), "{error}");
    }
    let error = refused("transformer.h.0.attn.c_attn", &settings);
    assert!(error.contains("8 outputs"), "{error}");
    let error = refused("transformer.h.0.mlp.c_fc", &config(2, 0.0));
    assert!(error.contains("lora_alpha"), "{error}");
    let mut pattern = settings;
    pattern["alpha_pattern"] = json!({"h.[0-3].mlp": 3});
    let error = refused("transformer.h.0.mlp.c_fc", &pattern);
    assert!(error.contains("h.[0-3].mlp"), "{error}");
    let error = format!("{:#}", import(Path::new("/nowhere")).unwrap_err());
    assert!(error.contains("adapter_config.json"), "{error}");
}
