//! Questions on a terminal, with arrow keys, and the interface that tests answer in its place.

use dialoguer::console::Term;
use dialoguer::theme::ColorfulTheme;
use dialoguer::{Confirm, Input, Select};

/// What a question returns.
pub type Answers<T> = Result<T, dialoguer::Error>;

/// Who answers.
pub trait Ask {
    /// One of several options, each with an explanation, by position.
    fn select(
        &mut self,
        question: &str,
        options: &[(&str, &str)],
        default: usize,
    ) -> Answers<usize>;
    /// Yes or no.
    fn confirm(&mut self, question: &str, default: bool) -> Answers<bool>;
    /// A whole number of at least `least`.
    fn number(&mut self, question: &str, default: usize, least: usize) -> Answers<usize>;
    /// A text; without a default it may not be empty.
    fn text(&mut self, question: &str, default: Option<&str>) -> Answers<String>;
    /// Why the question is asked again.
    fn remark(&mut self, text: &str);
}

/// The person at the terminal.
pub struct Terminal {
    theme: ColorfulTheme,
}

impl Terminal {
    pub fn new() -> Self {
        // A list of options hides the cursor; Ctrl-C must not leave it so.
        #[cfg(unix)]
        if let Ok(mut signals) = signal_hook::iterator::Signals::new([signal_hook::consts::SIGINT])
        {
            std::thread::spawn(move || {
                if signals.forever().next().is_some() {
                    let _ = Term::stderr().show_cursor();
                    std::process::exit(130);
                }
            });
        }
        Self { theme: ColorfulTheme::default() }
    }
}

impl Ask for Terminal {
    fn select(
        &mut self,
        question: &str,
        options: &[(&str, &str)],
        default: usize,
    ) -> Answers<usize> {
        let width = options.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let items = options.iter().map(|(name, about)| format!("{name:width$}  {about}"));
        Select::with_theme(&self.theme)
            .with_prompt(question)
            .items(items)
            .default(default)
            .interact()
    }

    fn confirm(&mut self, question: &str, default: bool) -> Answers<bool> {
        Confirm::with_theme(&self.theme).with_prompt(question).default(default).interact()
    }

    fn number(&mut self, question: &str, default: usize, least: usize) -> Answers<usize> {
        Input::with_theme(&self.theme)
            .with_prompt(question)
            .default(default)
            .validate_with(
                |number: &usize| {
                    if *number >= least { Ok(()) } else { Err(format!("at least {least}")) }
                },
            )
            .interact_text()
    }

    fn text(&mut self, question: &str, default: Option<&str>) -> Answers<String> {
        let input = Input::<String>::with_theme(&self.theme).with_prompt(question);
        match default {
            Some("") => input.allow_empty(true).interact_text(),
            Some(default) => input.default(default.into()).interact_text(),
            None => input.interact_text(),
        }
    }

    fn remark(&mut self, text: &str) {
        let _ = Term::stderr().write_line(text);
    }
}
