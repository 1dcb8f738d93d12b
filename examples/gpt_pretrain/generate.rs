//! Text generation: `--generate`.
//!
//! Every rank continues the texts that are its own, with all units kept gathered. Ranks therefore
//! generate different numbers of word pieces, without any collective.

use anyhow::{Context, Result, bail};
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Args;
use fsdp_runtime::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Serialize;

use crate::bpe::Bpe;
use crate::common::sampling::SamplingArgs;
use crate::model::{Cache, Gpt};

/// Arguments of generation.
#[derive(Args, Clone, Debug)]
pub struct GenerateArgs {
    /// Text to continue after the training; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = any_text)]
    pub generate: Vec<String>,

    /// Continue the texts of --generate, and neither train nor evaluate
    #[arg(long, requires = "generate")]
    pub generate_only: bool,

    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// A text, and its continuation.
#[derive(Clone, Debug, Serialize)]
pub struct Generated {
    /// Number of the text among those of `--generate`, from 0.
    pub index: usize,
    /// Text of `--generate`.
    pub prompt: String,
    /// Text that follows.
    pub text: String,
}

impl std::fmt::Display for Generated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.prompt, self.text)
    }
}

/// What continues texts.
pub struct Generator<'a> {
    /// Model, all of whose units are gathered.
    pub model: &'a Gpt,
    /// Tokenizer.
    pub bpe: &'a Bpe,
    /// Maximum number of word pieces that the model takes.
    pub positions: usize,
    /// Options.
    pub args: &'a GenerateArgs,
    /// Device, without autodiff.
    pub device: Device,
}

/// Accepts every text, also an empty one.
fn any_text(text: &str) -> Result<String, String> {
    Ok(text.to_string())
}

/// Continues the texts of this rank: every `world`-th of `--generate`. Every rank calls it.
///
/// # Errors
///
/// If there is no tokenizer, a peer fails, or the tokenizer fails on a text.
pub fn generate(
    model: &Fsdp<Gpt>,
    worker: &Worker,
    bpe: Option<&Bpe>,
    args: &GenerateArgs,
    (positions, seed): (usize, u64),
) -> Result<Vec<Generated>> {
    let Some(bpe) = bpe else {
        bail!(
            "--generate: the data have no tokenizer; preprocess them with `gpt_pretrain preprocess`"
        )
    };
    let model = model.valid();
    let _gathered = model.unshard()?;
    let device = worker.device().clone().inner();
    let generator = Generator { model: &model, bpe, positions, args, device };
    // Tensor parallel ranks compute the same texts together, of which the first gives them back.
    let mesh = model.stats().mesh();
    let (world, rank) = (mesh.world.size(), mesh.rank.index());
    let own = args.generate.iter().enumerate().skip(rank).step_by(world);
    let texts = own.map(|(index, prompt)| {
        // The texts do not depend on the number of ranks.
        let mut rng = StdRng::seed_from_u64(seed.wrapping_add(index as u64));
        let text = generator.continued(prompt, &mut rng)?;
        Ok(Generated { index, prompt: prompt.clone(), text })
    });
    let texts: Result<Vec<_>> = texts.collect();
    if mesh.tensor_rank() == 0 { texts } else { texts.map(|_| Vec::new()) }
}

impl Generator<'_> {
    /// Returns the continuation of a text.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails, or if the text is empty and there is no word piece to begin with.
    pub fn continued(&self, prompt: &str, rng: &mut StdRng) -> Result<String> {
        let mut ids = self.bpe.encode(prompt)?;
        if ids.is_empty() {
            let first = self.bpe.end_of_text();
            ids.push(first.context("--generate: an empty text, which these word pieces lack")?);
        }
        self.bpe.decode(&self.next_ids(ids, rng)?)
    }

    /// Returns the ids that follow `ids`, up to the end of the text or the maximum.
    ///
    /// # Errors
    ///
    /// If the device fails.
    pub fn next_ids(&self, mut ids: Vec<u32>, rng: &mut StdRng) -> Result<Vec<u32>> {
        let start = ids.len();
        let mut cache = Cache::default();
        // At first the whole text, or the end of it that the model takes.
        let mut new = ids[start - start.min(self.positions)..].to_vec();
        while ids.len() - start < self.args.sampling.max_new_tokens {
            let logits = self.model.next_logits(self.tensor(&new), &mut cache);
            let logits = logits.try_into_data()?.try_into_vec_as::<f32>()?;
            let known = self.bpe.vocabulary().min(logits.len());
            let id = self.args.sampling.draw(&logits[..known], rng);
            if Some(id) == self.bpe.end_of_text() {
                break;
            }
            ids.push(id);
            new = vec![id];
            if cache.len() == self.positions {
                // The second half of what the model has seen is its new beginning.
                cache = Cache::default();
                new = ids[ids.len() - self.positions.div_ceil(2)..].to_vec();
            }
        }
        Ok(ids.split_off(start))
    }

    fn tensor(&self, ids: &[u32]) -> Tensor<2, Int> {
        let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let length = ids.len();
        Tensor::from_data(TensorData::new(ids, [1, length]), &self.device)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::arch::Arch;
    use crate::cli::Cli;
    use crate::model::GptConfig;

    const TEXT: &str = "the white whale, the white squall\n\nthe whale’s way — the white way\n";

    fn args(flags: &str) -> GenerateArgs {
        let flags = ["gpt_pretrain", "--generate", TEXT].into_iter().chain(flags.split(' '));
        Cli::parse_from(flags).generate
    }

    fn model(bpe: &Bpe, positions: usize, device: &Device) -> Gpt {
        let vocabulary = bpe.vocabulary() + 7;
        let arch = Arch { name: "test", fairseq: None, layers: 2, width: 32, heads: 4, vocabulary };
        GptConfig { arch, positions, dropout: 0.0, tanh_gelu: false }.init(device)
    }

    /// Longer than the model's maximum, so that the cache begins anew.
    #[test]
    fn greedy_text_with_a_cache_is_that_without() {
        let device = crate::common::device::DeviceName::Flex.resolve().unwrap();
        device.seed(3);
        let bpe = Bpe::train(TEXT, 300).unwrap();
        let (positions, args) = (24, args("--temperature 0 --max-new-tokens 40"));
        let model = model(&bpe, positions, &device);
        let generator =
            Generator { model: &model, bpe: &bpe, positions, args: &args, device: device.clone() };
        let prompt = bpe.encode("the white").unwrap();
        let mut rng = StdRng::seed_from_u64(1);
        let cached = generator.next_ids(prompt.clone(), &mut rng).unwrap();
        assert_eq!(cached.len(), 40);

        let (mut ids, mut first) = (prompt.clone(), 0);
        for _ in 0..40 {
            let logits = model.forward(generator.tensor(&ids[first..]));
            let logits: Vec<f32> = logits.into_data().try_into_vec_as().unwrap();
            let last = &logits[logits.len() - bpe.vocabulary() - 7..][..bpe.vocabulary()];
            ids.push(args.sampling.draw(last, &mut rng));
            if ids.len() - 1 - first == positions {
                first = ids.len() - positions.div_ceil(2);
            }
        }
        assert_eq!(ids[prompt.len()..], cached);
    }

    /// The cache takes one word piece at a time, and at first several.
    #[test]
    fn logits_with_a_cache_are_those_without() {
        let device = crate::common::device::DeviceName::Flex.resolve().unwrap();
        device.seed(4);
        let bpe = Bpe::train(TEXT, 300).unwrap();
        let model = model(&bpe, 24, &device);
        let ids: Vec<i32> = bpe.encode(TEXT).unwrap()[..20].iter().map(|id| *id as i32).collect();
        let tensor = |ids: &[i32]| {
            Tensor::<2, Int>::from_data(TensorData::new(ids.to_vec(), [1, ids.len()]), &device)
        };
        let whole: Vec<f32> = model.forward(tensor(&ids)).into_data().try_into_vec_as().unwrap();
        let mut cache = Cache::default();
        for end in 5..=20 {
            let new = &ids[cache.len()..end];
            let logits = model.next_logits(tensor(new), &mut cache).into_data();
            let logits: Vec<f32> = logits.try_into_vec_as().unwrap();
            let expected = &whole[(end - 1) * logits.len()..end * logits.len()];
            let close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
            assert!(logits.iter().zip(expected).all(close), "{end}");
            assert_eq!(cache.len(), end);
        }
    }

    /// Rank 0 continues two texts and rank 1 one, before that one and two. A collective of one of them would
    /// wait for the others until the time-out.
    #[test]
    fn ranks_generate_different_lengths_without_a_collective() {
        let device = crate::common::device::DeviceName::Flex.resolve().unwrap();
        let bpe = Bpe::train(TEXT, 300).unwrap();
        let mut args = args("--max-new-tokens 9 --temperature 0.8 --top-k 20");
        args.generate = vec!["the".into(), "white".into()];
        let run = move |world: usize, prompts: usize| {
            let (bpe, mut args) = (bpe.clone(), args.clone());
            args.generate.resize(prompts, "way".into());
            launch(LaunchOptions::new(world).with_device(device.clone()), move |worker| {
                let model = model(&bpe, 24, worker.device());
                let options = FsdpOptions::new().with_seed(5);
                let model = fully_shard(model, &worker, options)?.valid();
                let units = model.stats().wrapping().units.len();
                let gathers = || model.stats().counts().all_gathers;
                {
                    let before = gathers();
                    let _gathered = model.unshard()?;
                    assert_eq!(gathers() - before, units);
                    let counts = model.stats().counts();
                    let device = worker.device().clone().inner();
                    let generator =
                        Generator { model: &model, bpe: &bpe, positions: 24, args: &args, device };
                    for _ in 0..=worker.rank().index() {
                        generator.continued("the", &mut StdRng::seed_from_u64(7))?;
                    }
                    assert_eq!(model.stats().counts(), counts, "no collective");
                }
                let before = gathers();
                let texts = generate(&model, &worker, Some(&bpe), &args, (24, 1))?;
                assert_eq!(gathers() - before, units, "one gather of each unit in total");
                let texts = texts.into_iter().map(|text| text.text).collect::<Vec<_>>();
                Ok::<_, anyhow::Error>((worker.rank().index(), texts))
            })
            .unwrap()
        };
        let mut one = run(1, 3);
        let mut two = run(2, 3);
        two.sort();
        assert_eq!(two.iter().map(|(_, texts)| texts.len()).collect::<Vec<_>>(), [2, 1]);
        let all = one.remove(0).1;
        assert_eq!(two[0].1, [all[0].clone(), all[2].clone()], "at any number of ranks");
        assert_eq!(two[1].1, all[1..2]);
        assert!(all.iter().all(|text| !text.is_empty()));
    }
}
