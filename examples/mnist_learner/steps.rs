//! The batches and steps of Burn's `Learner`, in plain Burn: without any code for ranks.

use burn::data::dataloader::batcher::Batcher;
use burn::tensor::Device;
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};

use super::data::{Batch, Digit, Digits};
use super::model::{Net, nll_loss_sum};

impl Batcher<Digit, Batch> for Digits {
    fn batch(&self, digits: Vec<Digit>, device: &Device) -> Batch {
        Batch::new(&digits, device)
    }
}

impl Net {
    fn classify(&self, batch: Batch) -> ClassificationOutput {
        let images = batch.targets.dims()[0];
        let output = self.forward(batch.images);
        let loss = nll_loss_sum(output.clone(), batch.targets.clone()) / images as f64;
        ClassificationOutput::new(loss, output, batch.targets)
    }
}

impl TrainStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.classify(batch)
    }
}
