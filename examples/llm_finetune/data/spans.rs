//! Finds the assistant's parts of a rendered conversation.
//!
//! [Note: spans by prefixes] The part of an assistant's turn begins where the rendering of the
//! messages before it ends, with the header that asks for an answer (`add_generation_prompt`). It
//! ends where the rendering of the messages up to it ends, and therefore includes the token that
//! ends the turn. Both renderings must be prefixes of the whole one. This works for each template
//! of this kind, with or without `{% generation %}`.

use super::message::Role;
use super::prefix::check_prefix;
use super::reason::Reason;
use super::row::Chat;
use super::template::ChatTemplate;

/// Part of a rendered conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The text.
    pub text: String,
    /// Whether its tokens count for the loss.
    pub counted: bool,
}

/// Divides a conversation into parts that count and parts that do not. The parts in their order are
/// the whole text.
///
/// # Errors
///
/// If the template refuses the messages, or renders the first messages differently when others
/// follow.
pub fn pieces(template: &ChatTemplate, chat: &Chat) -> Result<Vec<Piece>, Reason> {
    let messages = &chat.messages;
    let whole = render(template, chat, messages.len(), false)?;
    let mut pieces = Vec::new();
    let mut end = 0;
    let mut add = |range: std::ops::Range<usize>, counted| {
        if !range.is_empty() {
            pieces.push(Piece { text: whole[range].into(), counted });
        }
    };
    for (index, message) in messages.iter().enumerate().skip(chat.given) {
        if message.role() != Role::Assistant {
            continue;
        }
        let number = index + 1;
        let prompt = render(template, chat, index, true)?;
        let answered = render(template, chat, number, false)?;
        check_prefix(&prompt, &answered, number, "the answer follows")?;
        check_prefix(&answered, &whole, number, "later turns follow")?;
        let start = prompt.len().max(end);
        add(end..start, false);
        add(start..answered.len(), true);
        end = answered.len().max(start);
    }
    add(end..whole.len(), false);
    Ok(pieces)
}

/// Renders the whole conversation as one part that counts.
///
/// # Errors
///
/// If the template refuses the messages.
pub fn whole(template: &ChatTemplate, chat: &Chat) -> Result<Vec<Piece>, Reason> {
    let text = render(template, chat, chat.messages.len(), false)?;
    Ok(vec![Piece { text, counted: true }])
}

fn render(
    template: &ChatTemplate,
    chat: &Chat,
    messages: usize,
    add_generation_prompt: bool,
) -> Result<String, Reason> {
    template
        .render(&chat.messages[..messages], &chat.variables, add_generation_prompt)
        .map_err(|error| Reason::Template(error.to_string()))
}

#[cfg(test)]
mod tests {
    use minijinja::Value;

    use super::*;
    use crate::data::clock::Moment;
    use crate::data::row::Row;
    use crate::data::special_tokens::TokenizerConfig;

    const CHATML: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}\
                          {% if add_generation_prompt %}<assistant>{% endif %}";
    const TWO_TURNS: &str = r#"{"messages":[{"role":"user","content":"a"},
        {"role":"assistant","content":"b"},{"role":"user","content":"c"},
        {"role":"assistant","content":"d"},{"role":"user","content":"e"}]}"#;

    fn spans(template: &str, row: &str) -> Result<Vec<(String, bool)>, Reason> {
        let config = TokenizerConfig { template: Some(template.into()), ..Default::default() };
        let template = ChatTemplate::new(&config, Moment::from_unix(0)).unwrap().unwrap();
        let row: Value = serde_json::from_str(row).unwrap();
        let Row::Chat(chat) = Row::parse(&row).unwrap() else { panic!() };
        Ok(pieces(&template, &chat)?.into_iter().map(|piece| (piece.text, piece.counted)).collect())
    }

    fn pair(text: &str, counted: bool) -> (String, bool) {
        (text.into(), counted)
    }

    #[test]
    fn answers_and_their_end_tokens_count() {
        let expected = [
            pair("<user>a</>\n<assistant>", false),
            pair("b</>\n", true),
            pair("<user>c</>\n<assistant>", false),
            pair("d</>\n", true),
            pair("<user>e</>\n", false),
        ];
        assert_eq!(spans(CHATML, TWO_TURNS).unwrap(), expected);
        // Tags for generation, after which a line break is removed as after each block.
        let (start, end) = ("{%generation%}", "{%endgeneration%}\n");
        let tagged =
            CHATML.replace("{{ m.content }}</>", &format!("{start}{{{{ m.content }}}}</>{end}"));
        assert_eq!(spans(&tagged, TWO_TURNS).unwrap(), expected);
        // A conversation that begins with an answer.
        let first = r#"{"messages":[{"role":"assistant","content":"b"}]}"#;
        let expected = [pair("<assistant>", false), pair("b</>\n", true)];
        assert_eq!(spans(CHATML, first).unwrap(), expected);
    }

    #[test]
    fn answers_in_the_prompt_do_not_count() {
        let row = r#"{"prompt":[{"role":"user","content":"a"},{"role":"assistant","content":"b"},
            {"role":"user","content":"c"}],"completion":[{"role":"assistant","content":"d"}]}"#;
        let expected = [
            pair("<user>a</>\n<assistant>b</>\n<user>c</>\n<assistant>", false),
            pair("d</>\n", true),
        ];
        assert_eq!(spans(CHATML, row).unwrap(), expected);
    }

    #[test]
    fn a_template_that_changes_earlier_turns_is_an_error() {
        // As Qwen3, which keeps the reasoning of the last answer only.
        let drops = "{% for m in messages %}<{{ m.role }}>{% if m.thinking and loop.last %}\
                     [{{ m.thinking }}]{% endif %}{{ m.content }}</>{% endfor %}\
                     {% if add_generation_prompt %}<assistant>{% endif %}";
        let row = TWO_TURNS.replace(r#""content":"b""#, r#""content":"b","thinking":"why""#);
        let Err(Reason::Prefix(error)) = spans(drops, &row) else { panic!() };
        assert_eq!((error.message, error.offset), (2, 21));
        assert_eq!(error.longer, "later turns follow");
        assert_eq!(error.before, "<user>a</><assistant>[why]b</>");
        assert!(error.after.starts_with("<user>a</><assistant>b</><user>c"), "{error}");
        // A template that ignores the request for a header.
        let row =
            r#"{"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b"}]}"#;
        let other = CHATML.replace("<assistant>{%", "[answer]{%");
        let Err(Reason::Prefix(error)) = spans(&other, row) else { panic!() };
        assert_eq!((error.message, error.longer), (2, "the answer follows"));
    }

    #[test]
    fn an_exception_of_the_template_is_a_reason() {
        let error = spans("{{ raise_exception('no') }}", TWO_TURNS).unwrap_err();
        assert!(matches!(&error, Reason::Template(text) if text.contains("no")), "{error}");
    }
}
