//! The events of Burn's metrics, dashboard and logs, which only rank 0 has.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::train::renderer::MetricsRenderer;
use burn::train::{
    EventProcessorTraining, InferenceStep, Interrupter, LearnerEvent, LearnerModel, LearnerSummary,
    SupervisedTrainingEventProcessor, TrainStep,
};

/// Receiver of the events of a training run: the dashboard and the metrics on rank 0, nothing on
/// other ranks.
pub(super) struct Events<M: LearnerModel> {
    processor: SupervisedTrainingEventProcessor<M>,
    interrupter: Interrupter,
    leads: bool,
}

impl<M: LearnerModel + 'static> Events<M> {
    /// Creates the receiver. `leads` says whether this is rank 0; other ranks drop their events.
    pub(super) fn new(
        processor: SupervisedTrainingEventProcessor<M>,
        interrupter: Interrupter,
        leads: bool,
    ) -> Self {
        Self { processor, interrupter, leads }
    }

    pub(super) fn leads(&self) -> bool {
        self.leads
    }

    pub(super) fn train(&mut self, event: LearnerEvent<<M as TrainStep>::Output>) {
        if self.leads {
            self.interrupter.fail_on_error(self.processor.process_train(event));
        }
    }

    pub(super) fn valid(&mut self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        if self.leads {
            self.interrupter.fail_on_error(self.processor.process_valid(event));
        }
    }

    /// Waits until all events are processed.
    pub(super) fn flush(&mut self) {
        if self.leads {
            self.interrupter.fail_on_error(self.processor.flush());
        }
    }

    /// Ends the run and returns the renderer.
    pub(super) fn end(mut self, summary: Option<LearnerSummary>) -> Box<dyn MetricsRenderer> {
        self.train(LearnerEvent::End(summary));
        self.flush();
        self.processor.renderer()
    }

    /// Ends a run that an error or a panic stops, so that the terminal is as it was. The dashboard
    /// gives the terminal back when it is dropped, but not while its thread unwinds.
    pub(super) fn abandon(self) {
        // A processor whose thread has panicked panics here again; the first cause is what matters.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(self.end(None))));
    }
}
