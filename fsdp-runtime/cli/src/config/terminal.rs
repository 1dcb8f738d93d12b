//! Questions on a terminal: lists with arrow keys, and lines of text.

use dialoguer::console::Term;
use dialoguer::theme::ColorfulTheme;
use dialoguer::{Confirm, Input, Select};

use super::ask::{Answer, Ask};

/// The terminal of this process.
pub(super) struct Terminal {
    theme: ColorfulTheme,
}

impl Terminal {
    pub(super) fn new() -> Self {
        // A list of options hides the cursor. Ctrl-C must show the cursor again.
        #[cfg(unix)]
        if let Ok(mut signals) = signal_hook::iterator::Signals::new([signal_hook::consts::SIGINT])
        {
            std::thread::spawn(move || {
                if signals.forever().next().is_some() {
                    let _ = Term::stderr().show_cursor();
                    // 128 + SIGINT, as a shell reports it.
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
    ) -> Answer<usize> {
        let width = options.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let items = options.iter().map(|(name, about)| format!("{name:width$}  {about}"));
        Select::with_theme(&self.theme)
            .with_prompt(question)
            .items(items)
            .default(default)
            .interact()
    }

    fn confirm(&mut self, question: &str, default: bool) -> Answer<bool> {
        Confirm::with_theme(&self.theme).with_prompt(question).default(default).interact()
    }

    fn number(&mut self, question: &str, default: usize, least: usize) -> Answer<usize> {
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

    fn text(&mut self, question: &str, default: Option<&str>) -> Answer<String> {
        let input = Input::<String>::with_theme(&self.theme).with_prompt(question);
        match default {
            Some("") => input.allow_empty(true).interact_text(),
            Some(default) => input.default(default.into()).interact_text(),
            None => input.interact_text(),
        }
    }

    fn refuse(&mut self, reason: &str) {
        let _ = Term::stderr().write_line(reason);
    }
}
