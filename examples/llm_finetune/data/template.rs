//! Chat templates, rendered as transformers' `apply_chat_template` renders them.
//!
//! | in transformers | here |
//! |---|---|
//! | `trim_blocks`, `lstrip_blocks`, `break`, `continue` | settings of minijinja |
//! | methods and tests of Python's types | [`python_methods`](super::python_methods) |
//! | texts of numbers | [`python_text`](super::python_text) |
//! | `tojson`, which does not escape HTML | [`python_json`](super::python_json) |
//! | `raise_exception`, `strftime_now` | functions; the time is in UTC |
//! | `{% generation %}` blocks | kept as blocks without an effect |
//! | template `tool_use` for conversations with tools | the same |

use minijinja::{Environment, Error, ErrorKind, Value};

use super::clock::Moment;
use super::message::Message;
use super::python_json::tojson;
use super::special_tokens::TokenizerConfig;
use super::{python_methods, python_text};

const DEFAULT: &str = "chat template";
const TOOL_USE: &str = "chat template for tools";

/// A chat template with the special tokens that it may write.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special: Vec<(&'static str, String)>,
    has_tool_use: bool,
}

impl ChatTemplate {
    /// Compiles the templates of a configuration. Returns `None` if it has no template.
    ///
    /// # Errors
    ///
    /// If a template has an error of syntax.
    pub fn new(config: &TokenizerConfig, now: Moment) -> Result<Option<Self>, Error> {
        let Some(template) = &config.template else { return Ok(None) };
        let mut environment = environment(now)?;
        environment.add_template_owned(DEFAULT, without_generation_tags(template))?;
        if let Some(template) = &config.tool_template {
            environment.add_template_owned(TOOL_USE, without_generation_tags(template))?;
        }
        let has_tool_use = config.tool_template.is_some();
        Ok(Some(Self { environment, special: config.special.clone(), has_tool_use }))
    }

    /// Renders messages. `variables` are those beside the messages, such as `tools`; they replace
    /// special tokens of the same name.
    ///
    /// # Errors
    ///
    /// If the template refuses the messages.
    pub fn render(
        &self,
        messages: &[Message],
        variables: &[(String, Value)],
        add_generation_prompt: bool,
    ) -> Result<String, Error> {
        let has_tools = variables.iter().any(|(name, _)| name == "tools");
        let name = if has_tools && self.has_tool_use { TOOL_USE } else { DEFAULT };
        let messages: Value = messages.iter().map(|message| message.value().clone()).collect();
        let defaults = [("tools", Value::from(())), ("documents", Value::from(()))];
        let special = self.special.iter().map(|(name, token)| (*name, token.into()));
        let given = variables.iter().map(|(name, value)| (name.as_str(), value.clone()));
        let last =
            [("messages", messages), ("add_generation_prompt", Value::from(add_generation_prompt))];
        let all = defaults.into_iter().chain(special).chain(given).chain(last);
        self.environment.get_template(name)?.render(Value::from_pairs(all))
    }
}

fn environment(now: Moment) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    let syntax = environment.syntax().to_builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    // Templates are no HTML, whatever their names end with.
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(python_methods::call);
    environment.add_test("sequence", python_methods::is_sequence);
    environment.add_test("iterable", python_methods::is_iterable);
    environment.set_formatter(python_text::write);
    environment.add_filter("string", python_text::string);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", move |format: &str| now.format(format));
    Ok(environment)
}

/// Replaces `{% generation %}`, which marks the assistant's text and which minijinja does not know,
/// by a block with the same rules for names and white space.
fn without_generation_tags(template: &str) -> String {
    let mut text = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        text.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        match tag.trim_matches(['{', '}', '%', '-', '+']).trim() {
            "generation" => text.push_str(&tag.replace("generation", "with")),
            "endgeneration" => text.push_str(&tag.replace("endgeneration", "endwith")),
            _ => text.push_str(tag),
        }
        rest = after;
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use super::super::message::Role;
    use super::*;

    fn template(text: &str) -> ChatTemplate {
        let special = vec![("eos_token", "</s>".into())];
        let config = TokenizerConfig { special, template: Some(text.into()), tool_template: None };
        ChatTemplate::new(&config, Moment::from_unix(0)).unwrap().unwrap()
    }

    fn render(text: &str) -> Result<String, Error> {
        let messages = [Message::new(Role::User, "a"), Message::new(Role::Assistant, "b")];
        template(text).render(&messages, &[("extra".into(), Value::from(3))], true)
    }

    #[test]
    fn blocks_of_generation_keep_their_text() {
        let with = "{% for m in messages %}\n  {%- generation -%}\n {{ m.content }} \
                    {% endgeneration %}\n|{% endfor %}";
        assert_eq!(render(with).unwrap(), "a |b |");
        // The rules for white space are those of other blocks.
        let equal = with.replace("endgeneration", "endif").replace("generation", "if true");
        assert_eq!(render(with).unwrap(), render(&equal).unwrap());
        // Names that are set within are unknown outside, as in transformers.
        let scope = "{% set x = 1 %}{%generation%}{% set x = 2 %}{%endgeneration%}{{ x }}";
        assert_eq!(render(scope).unwrap(), "1");
    }

    #[test]
    fn variables_and_functions_are_those_of_transformers() {
        let text = "{{ eos_token }}{{ bos_token }}{{ extra }}{{ tools is none }}\
                    {{ add_generation_prompt }}{{ strftime_now('%d %b %Y') }}";
        assert_eq!(render(text).unwrap(), "</s>3TrueTrue01 Jan 1970");
        let loops = "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}\
                     {{ m['content'] }}{% endfor %}{{ messages[::-1][0].content }}";
        assert_eq!(render(loops).unwrap(), "ab");
        assert_eq!(render("{{ '<a&b>' }}\n").unwrap(), "<a&b>");
        // A block leaves neither the spaces before it nor the line break after it.
        assert_eq!(render("a\n  {% if true %}\n b{% endif %}").unwrap(), "a\n b");
    }

    #[test]
    fn an_exception_of_the_template_is_an_error() {
        let error = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
        assert!(error.to_string().contains("roles must alternate"), "{error}");
    }

    #[test]
    fn a_template_for_tools_is_used_with_tools() {
        let config = TokenizerConfig {
            template: Some("plain".into()),
            tool_template: Some("tools".into()),
            ..TokenizerConfig::default()
        };
        let template = ChatTemplate::new(&config, Moment::from_unix(0)).unwrap().unwrap();
        let tools = [("tools".to_string(), Value::from_iter([1]))];
        assert_eq!(template.render(&[], &tools, false).unwrap(), "tools");
        assert_eq!(template.render(&[], &[], false).unwrap(), "plain");
        let broken = TokenizerConfig { template: Some("{% if %}".into()), ..config };
        assert!(ChatTemplate::new(&broken, Moment::from_unix(0)).is_err());
    }
}
