//! The interface through which questions are asked. A terminal implements it, and so do tests.

/// The answer to a question, or the error of the terminal.
pub(super) type Answer<T> = Result<T, dialoguer::Error>;

/// Asks a person questions.
pub(super) trait Ask {
    /// Asks to choose one of several options, each a name and an explanation. Returns the index of
    /// the choice.
    fn select(&mut self, question: &str, options: &[(&str, &str)], default: usize)
    -> Answer<usize>;

    /// Asks a yes/no question.
    fn confirm(&mut self, question: &str, default: bool) -> Answer<bool>;

    /// Asks for a whole number of at least `least`.
    fn number(&mut self, question: &str, default: usize, least: usize) -> Answer<usize>;

    /// Asks for a text. Without a default, the text must not be empty; with the default `""` it
    /// may.
    fn text(&mut self, question: &str, default: Option<&str>) -> Answer<String>;

    /// Shows why the last answer was refused; the question is asked again.
    fn refuse(&mut self, reason: &str);
}
