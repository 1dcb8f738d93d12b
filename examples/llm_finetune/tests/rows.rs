//! Conversations of one row do not see each other.

use burn::tensor::{Device, Int, Tensor, TensorData};
use fsdp_runtime::nn::AttentionOptions;
use fsdp_runtime::prelude::*;
use fsdp_runtime::pretrained::{LoadOptions, from_pretrained};

use super::logits::folder;
use crate::common::device::DeviceName;
use crate::config::ModelConfig;
use crate::model::{CausalLm, Rows};

/// Tokens of a row.
const LENGTH: usize = 32;

/// Computes the mean loss of each conversation, given those in each row.
fn losses(model: &CausalLm, rows: &[&[Vec<i32>]], device: &Device) -> anyhow::Result<Vec<f64>> {
    let shape = [rows.len(), LENGTH];
    let [mut ids, mut positions, mut segments] =
        [0, 0, -1].map(|padding| vec![padding; rows.len() * LENGTH]);
    let mut places = Vec::new();
    for (row, conversations) in rows.iter().enumerate() {
        let mut start = row * LENGTH;
        for (segment, conversation) in conversations.iter().enumerate() {
            for (at, id) in conversation.iter().enumerate() {
                ids[start + at] = *id;
                positions[start + at] = at as i32;
                segments[start + at] = segment as i32;
            }
            places.push((start, conversation));
            start += conversation.len();
        }
        assert!(start <= (row + 1) * LENGTH, "the row is too short");
    }
    let ints = |numbers| Tensor::<2, Int>::from_data(TensorData::new(numbers, shape), device);
    let sight = AttentionOptions::new().with_causal(true);
    let sight = sight.with_segment_data(&TensorData::new(segments, shape));
    let rows = Rows { ids: ints(ids), positions: ints(positions), sight };
    let logits = model.forward(rows);
    let [_, vocabulary] = logits.dims();
    let logits = logits.try_into_data()?.try_into_vec_as::<f32>()?;
    let loss = |(start, conversation): (usize, &Vec<i32>)| {
        let of_token = |at: usize| {
            let scores = &logits[(start + at) * vocabulary..][..vocabulary];
            let sum: f64 = scores.iter().map(|score| f64::from(*score).exp()).sum();
            sum.ln() - f64::from(scores[conversation[at + 1] as usize])
        };
        let count = conversation.len() - 1;
        (0..count).map(of_token).sum::<f64>() / count as f64
    };
    Ok(places.into_iter().map(loss).collect())
}

/// Returns a conversation of random ids.
fn conversation(length: i32, seed: i32) -> Vec<i32> {
    (0..length).map(|at| 3 + (at * at * 7 + seed * 31 + at * seed) % 61).collect()
}

#[test]
fn a_conversation_has_the_same_loss_in_every_row() {
    for name in ["llama", "mistral", "qwen2", "qwen3"] {
        let folder = folder(name);
        let config = ModelConfig::read(&folder).unwrap();
        let device = DeviceName::Flex.resolve().unwrap();
        launch(LaunchOptions::new(1).with_device(device), move |worker| {
            let model = config.init(64, worker.device());
            let load = LoadOptions::new();
            let (model, _) = from_pretrained(model, &worker, FsdpOptions::new(), &folder, &load)?;
            let (model, device) = (model.valid(), worker.device().clone().inner());
            let _gathered = model.unshard()?;
            let [a, b, c, d] =
                [(9, 1), (14, 2), (7, 3), (20, 4)].map(|(length, seed)| conversation(length, seed));
            let alone = [&a, &b, &c, &d].map(std::slice::from_ref);
            let padded = losses(&model, &alone, &device)?;
            let in_order = [a.clone(), b.clone(), c.clone()];
            let packed = losses(&model, &[&in_order, std::slice::from_ref(&d)], &device)?;
            // Longest first.
            let first_fit =
                losses(&model, &[&[d.clone(), a.clone()], &[b.clone(), c.clone()]], &device)?;
            let first_fit = [1, 2, 3, 0].map(|at| first_fit[at]);
            for (at, alone) in padded.iter().enumerate() {
                for found in [packed[at], first_fit[at]] {
                    assert!((found - alone).abs() < 1e-5, "{name}, {at}: {found} {alone}");
                }
            }
            // Another conversation in the middle moves no loss but its own.
            let other = conversation(14, 9);
            let found = losses(&model, &[&[a, other, c], &[d]], &device)?;
            assert_eq!([found[0], found[2], found[3]], [packed[0], packed[2], packed[3]], "{name}");
            assert!((found[1] - packed[1]).abs() > 1e-2, "{name}");
            Ok::<_, anyhow::Error>(())
        })
        .unwrap();
    }
}
