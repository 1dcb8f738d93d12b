//! Answers of the model: `--generate` and `--chat`.
//!
//! All units are kept gathered. Ranks therefore generate different numbers of tokens, without any
//! collective: no rank waits for another one.

use std::io::{BufRead, Write};

use anyhow::{Context, Result};
use burn::tensor::{Device, Int, Tensor, TensorData};
use clap::Args;
use fsdp_runtime::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Serialize;

use crate::common::sampling::SamplingArgs;
use crate::data::{ChatTokenizer, Message, Role};
use crate::job::Job;
use crate::model::{Cache, CausalLm};

/// Arguments of generation.
#[derive(Args, Clone, Debug)]
pub struct GenerateArgs {
    /// Message to answer after the training; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub generate: Vec<String>,

    /// Answer messages from standard input after the training, as one conversation; an empty line ends it.
    /// Rank 0 must be a thread of this process
    #[arg(long)]
    pub chat: bool,

    /// Answer the messages of --generate and --chat, and neither train nor evaluate
    #[arg(long)]
    pub no_training: bool,

    #[command(flatten)]
    pub sampling: SamplingArgs,
}

/// A message, and its answer.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// Number of the message among those of `--generate`, from 0.
    pub index: usize,
    /// Message of the user.
    pub prompt: String,
    /// Answer of the model.
    pub text: String,
}

impl std::fmt::Display for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "> {}\n{}", self.prompt, self.text)
    }
}

/// What answers conversations.
pub struct Generator<'a> {
    /// Model, all of whose units are gathered.
    pub model: &'a CausalLm,
    /// Tokenizer, with its chat template.
    pub tokenizer: &'a ChatTokenizer,
    /// Maximum number of tokens that the model takes.
    pub positions: usize,
    /// Options.
    pub sampling: SamplingArgs,
    /// Device, without autodiff.
    pub device: Device,
}

/// Answers the messages of this rank: every `world`-th of `--generate`. With `--chat`, rank 0 then answers
/// those from standard input. Every rank calls it.
///
/// # Errors
///
/// If a peer fails, a message is longer than the model takes, or the template refuses it.
pub fn generate(job: &Job, model: &Fsdp<CausalLm>, worker: &Worker) -> Result<Vec<Answer>> {
    let GenerateArgs { generate, chat, sampling, .. } = &job.generate;
    if generate.is_empty() && !chat {
        return Ok(Vec::new());
    }
    let model = model.valid();
    let _gathered = model.unshard()?;
    let device = worker.device().clone().inner();
    let (positions, tokenizer) = (job.positions, &*job.tokenizer);
    let generator = Generator { model: &model, tokenizer, positions, sampling: *sampling, device };
    // Tensor parallel ranks compute the same answers together.
    let mesh = model.stats().mesh();
    let (world, rank) = (mesh.world.size(), mesh.rank.index());
    let own = generate.iter().enumerate().skip(rank).step_by(world);
    let answers = own.map(|(index, prompt)| {
        // The answers do not depend on the number of ranks.
        let mut rng = StdRng::seed_from_u64(job.recipe.args.seed.wrapping_add(index as u64));
        let text = generator.answer(&[Message::new(Role::User, prompt)], &mut rng, |_| Ok(()))?;
        Ok(Answer { index, prompt: prompt.clone(), text })
    });
    let answers: Vec<Answer> = answers.collect::<Result<_>>()?;
    let answers = if mesh.tensor_rank() == 0 { answers } else { Vec::new() };
    if *chat && worker.is_rank_zero() {
        let mut rng = StdRng::seed_from_u64(job.recipe.args.seed);
        generator.converse(&mut std::io::stdin().lock(), &mut std::io::stdout(), &mut rng)?;
    }
    Ok(answers)
}

impl Generator<'_> {
    /// Answers one message after another until an empty line or the end of the input.
    ///
    /// # Errors
    ///
    /// If the input or the output fails, or as [`answer`](Self::answer).
    pub fn converse(
        &self,
        input: &mut impl BufRead,
        output: &mut impl Write,
        rng: &mut StdRng,
    ) -> Result<()> {
        let mut messages = Vec::new();
        loop {
            write!(output, "> ")?;
            output.flush()?;
            let mut line = String::new();
            input.read_line(&mut line).context("--chat: cannot read the message")?;
            if line.trim().is_empty() {
                return Ok(());
            }
            messages.push(Message::new(Role::User, line.trim()));
            let mut shown = 0;
            let text = self.answer(&messages, rng, |text| {
                // The last character may be a part of one.
                let complete = text.trim_end_matches(char::REPLACEMENT_CHARACTER);
                if let Some(new) = complete.get(shown..) {
                    write!(output, "{new}")?;
                    output.flush()?;
                    shown = complete.len();
                }
                Ok(())
            })?;
            writeln!(output, "{}", text.get(shown..).unwrap_or_default())?;
            messages.push(Message::new(Role::Assistant, &text));
        }
    }

    /// Returns the model's answer to a conversation that ends with a message of the user. `progress` gets
    /// the answer so far, after each token.
    ///
    /// # Errors
    ///
    /// If the conversation is longer than the model takes, the template refuses it, or the device fails.
    pub fn answer(
        &self,
        messages: &[Message],
        rng: &mut StdRng,
        mut progress: impl FnMut(&str) -> Result<()>,
    ) -> Result<String> {
        let prompt = self.tokenizer.encode_prompt(messages)?;
        let known = prompt.len();
        anyhow::ensure!(
            (1..self.positions).contains(&known),
            "a conversation of {known} tokens, where the model takes from 1 to {}",
            self.positions - 1
        );
        let (mut cache, mut new, mut ids) = (Cache::default(), prompt, Vec::new());
        let ends = self.tokenizer.eos_ids();
        while ids.len() < self.sampling.max_new_tokens && cache.len() + new.len() <= self.positions
        {
            let logits = self.model.next_logits(self.tensor(&new), &mut cache);
            let logits = logits.try_into_data()?.try_into_vec_as::<f32>()?;
            let id = self.sampling.draw(&logits, rng);
            if ends.contains(&id) {
                break;
            }
            ids.push(id);
            new = vec![id];
            progress(&self.tokenizer.decode(&ids)?)?;
        }
        self.tokenizer.decode(&ids)
    }

    fn tensor(&self, ids: &[u32]) -> Tensor<2, Int> {
        let ids: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        let length = ids.len();
        Tensor::from_data(TensorData::new(ids, [1, length]), &self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::device::DeviceName;
    use crate::job::Model;

    fn with_tiny<T>(positions: usize, test: impl FnOnce(&Generator<'_>) -> T) -> T {
        let device = DeviceName::Flex.resolve().unwrap();
        device.seed(2);
        let tiny = Model::read(None).unwrap();
        let model = tiny.config.init(positions, &device);
        let sampling =
            SamplingArgs { max_new_tokens: 12, temperature: 0.0, top_k: None, top_p: None };
        let tokenizer = &tiny.tokenizer;
        test(&Generator { model: &model, tokenizer, positions, sampling, device })
    }

    /// Each message is answered with all messages before it in view.
    #[test]
    fn a_conversation_ends_at_an_empty_line() {
        with_tiny(256, |generator| {
            let mut output = Vec::new();
            let mut rng = StdRng::seed_from_u64(1);
            let input = "Hello\nWhat is 2 + 3?\n\nnever read\n";
            generator.converse(&mut input.as_bytes(), &mut output, &mut rng).unwrap();
            let first = [Message::new(Role::User, "Hello")];
            let answer = generator.answer(&first, &mut rng, |_| Ok(())).unwrap();
            let [hello] = first;
            let second = [
                hello,
                Message::new(Role::Assistant, &answer),
                Message::new(Role::User, "What is 2 + 3?"),
            ];
            let next = generator.answer(&second, &mut rng, |_| Ok(())).unwrap();
            assert_eq!(String::from_utf8(output).unwrap(), format!("> {answer}\n> {next}\n> "));
        });
    }

    #[test]
    fn an_answer_ends_where_the_positions_do() {
        let message = [Message::new(Role::User, "Hello")];
        let tokens = |positions| {
            with_tiny(positions, |generator| {
                let (mut rng, mut count) = (StdRng::seed_from_u64(1), 0);
                let prompt = generator.tokenizer.encode_prompt(&message).unwrap().len();
                let answer = generator.answer(&message, &mut rng, |_| {
                    count += 1;
                    Ok(())
                });
                answer.map(|_| (prompt, count))
            })
        };
        let (prompt, count) = tokens(256).unwrap();
        assert_eq!(count, 12, "`max_new_tokens`, as the model has not learned to end");
        // The last token needs no position.
        assert_eq!(tokens(prompt + 3).unwrap(), (prompt, 4));
        let error = tokens(prompt).unwrap_err().to_string();
        assert!(error.contains(&format!("a conversation of {prompt} tokens")), "{error}");
    }
}
