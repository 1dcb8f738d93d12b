//! The renderer of ranks that show nothing.

use burn::train::LearnerSummary;
use burn::train::logger::{EvaluationProgressLogger, TrainingProgressLogger};
use burn::train::metric::MetricDefinition;
use burn::train::renderer::{
    EvaluationName, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining,
};

/// A renderer without output.
pub(super) struct Silent;

type Ended = Result<(), Box<dyn std::error::Error>>;

impl MetricsRendererTraining for Silent {
    fn update_train(&mut self, _: MetricState) {}

    fn update_valid(&mut self, _: MetricState) {}

    fn on_train_end(&mut self, _: Option<LearnerSummary>) -> Ended {
        Ok(())
    }
}

impl MetricsRendererEvaluation for Silent {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn on_test_end(&mut self, _: Option<LearnerSummary>) -> Ended {
        Ok(())
    }
}

impl TrainingProgressLogger for Silent {
    fn start(&mut self, _: usize, _: usize, _: Option<usize>, _: Option<&str>) {}

    fn update_epoch(&mut self, _: usize) {}

    fn start_split(&mut self, _: &str, _: usize) {}

    fn update_split(&mut self, _: usize) {}

    fn end_split(&mut self) {}

    fn end(&mut self) {}

    fn log_event_training(&mut self, _: String) {}
}

impl EvaluationProgressLogger for Silent {
    fn start_global_progress(&mut self, _: usize) {}

    fn start_test(&mut self, _: &str, _: usize) {}

    fn update_test_progress(&mut self, _: usize) {}

    fn end_test(&mut self) {}

    fn end_global_progress(&mut self) {}

    fn log_event_evaluation(&mut self, _: String) {}
}

impl MetricsRenderer for Silent {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _: MetricDefinition) {}
}
