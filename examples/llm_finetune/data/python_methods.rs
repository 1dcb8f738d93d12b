//! Python's methods and tests that chat templates use and minijinja lacks.

use minijinja::value::{ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

/// Calls a method of a Python string, list or dictionary.
///
/// # Errors
///
/// If the method is unknown, or refuses its arguments.
pub fn call(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let known = match value.as_str() {
        Some(text) => string_method(text, method, args)?,
        None => None,
    };
    match known {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, method, args),
    }
}

fn string_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let one = || -> Result<&str, Error> {
        let (argument,): (&str,) = from_args(args)?;
        Ok(argument)
    };
    let separator = || -> Result<&str, Error> {
        let argument = one()?;
        if argument.is_empty() {
            return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
        }
        Ok(argument)
    };
    let three = |parts: [&str; 3]| Value::from_iter(parts);
    let result = match method {
        "removeprefix" => Value::from(text.strip_prefix(one()?).unwrap_or(text)),
        "removesuffix" => Value::from(text.strip_suffix(one()?).unwrap_or(text)),
        "partition" => {
            let at = separator()?;
            three(text.split_once(at).map_or([text, "", ""], |(head, tail)| [head, at, tail]))
        }
        "rpartition" => {
            let at = separator()?;
            three(text.rsplit_once(at).map_or(["", "", text], |(head, tail)| [head, at, tail]))
        }
        "rsplit" => rsplit(text, args)?,
        _ => return Ok(None),
    };
    Ok(Some(result))
}

/// Splits a text as Python's `rsplit(separator, maxsplit)`.
fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
    let most = usize::try_from(most.unwrap_or(-1)).unwrap_or(usize::MAX).saturating_add(1);
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(separator) => text.rsplitn(most, separator).collect(),
        None if most == usize::MAX => text.split_whitespace().rev().collect(),
        None => {
            let message = "rsplit: a limit without a separator is not supported";
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    };
    parts.reverse();
    Ok(Value::from_iter(parts))
}

/// Test `sequence` as in Jinja: a value with a length and elements, such as a string or a
/// dictionary.
pub fn is_sequence(value: &Value) -> bool {
    let kinds = [ValueKind::Seq, ValueKind::String, ValueKind::Map, ValueKind::Undefined];
    kinds.contains(&value.kind())
}

/// Test `iterable` as in Jinja: a string, too, but not `none`.
pub fn is_iterable(value: &Value) -> bool {
    value.kind() == ValueKind::String || (!value.is_none() && value.try_iter().is_ok())
}

#[cfg(test)]
mod tests {
    fn render(template: &str) -> String {
        let mut environment = minijinja::Environment::new();
        environment.set_unknown_method_callback(super::call);
        environment.add_test("sequence", super::is_sequence);
        environment.add_test("iterable", super::is_iterable);
        environment.render_str(template, ()).unwrap()
    }

    const TYPES: &str = "(True, True, False, False)";

    #[test]
    fn methods_return_what_python_returns() {
        for (expression, expected) in [
            ("'<a>x'.removeprefix('<a>')", "x"),
            ("'x</a>'.removesuffix('<a>')", "x</a>"),
            ("'a=b=c'.partition('=')|join('|')", "a|=|b=c"),
            ("'a=b=c'.rpartition('=')|join('|')", "a=b|=|c"),
            ("'abc'.partition('=')|join('|')", "abc||"),
            ("'a,b,c'.rsplit(',', 1)|join('|')", "a,b|c"),
            ("' a  b '.rsplit()|join('|')", "a|b"),
            ("'a</think>b</think>c'.split('</think>')[-1]", "c"),
            ("' x\n'.strip() ~ '|' ~ '\nx'.lstrip('\n')", "x|x"),
            ("('x' is sequence, 'x' is iterable, 3 is iterable, none is iterable)", TYPES),
        ] {
            let text = render(&format!("{{{{ {expression} }}}}"));
            assert_eq!(text, expected, "{expression}");
        }
    }
}
