//! Formats values as Python's `str`, where minijinja formats them differently.

use minijinja::{Error, Output, State, Value, escape_formatter};

/// Writes the value of `{{ .. }}` to the output.
///
/// # Errors
///
/// If the value cannot be written.
pub fn write(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match float_of(value) {
        Some(number) => Ok(out.write_str(&float(number))?),
        None => escape_formatter(out, state, value),
    }
}

/// Filter `string`: converts a value to a text.
pub fn string(value: &Value) -> Value {
    match float_of(value) {
        Some(number) => Value::from(float(number)),
        None if value.as_str().is_some() => value.clone(),
        None => Value::from(value.to_string()),
    }
}

/// Formats a finite number as Python's `repr`: `1e-05` where Rust has `1e-5`, and `1e+16` for
/// `1e16`.
pub fn float(number: f64) -> String {
    let text = format!("{number:?}");
    let Some((digits, exponent)) = text.split_once('e') else { return text };
    match exponent.strip_prefix('-') {
        Some(exponent) => format!("{digits}e-{exponent:0>2}"),
        None => format!("{digits}e+{exponent:0>2}"),
    }
}

fn float_of(value: &Value) -> Option<f64> {
    let is_float = value.is_number() && !value.is_integer();
    is_float.then(|| f64::try_from(value.clone()).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_python() {
        let numbers = [1.0, 0.1, 1e-5, 1.5e-7, 1e16, 1e15, -2.5e300, 123456.75];
        let texts = numbers.map(float);
        let python = [
            "1.0",
            "0.1",
            "1e-05",
            "1.5e-07",
            "1e+16",
            "1000000000000000.0",
            "-2.5e+300",
            "123456.75",
        ];
        assert_eq!(texts, python);
        let mut environment = minijinja::Environment::new();
        environment.set_formatter(write);
        environment.add_filter("string", string);
        let text = environment.render_str("{{ 0.00001 }} {{ 0.00001|string ~ 'x' }} {{ 3 }}", ());
        assert_eq!(text.unwrap(), "1e-05 1e-05x 3");
    }
}
