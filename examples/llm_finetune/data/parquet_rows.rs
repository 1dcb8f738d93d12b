//! Reads the rows of a Parquet file, as the Hugging Face Hub has them.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use minijinja::Value;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Field, Row as ParquetRow};
use parquet::schema::types::Type;

use super::record::{Content, Record, Records};
use super::row::COLUMNS;

/// Returns the rows of a file, with the columns that are read.
///
/// # Errors
///
/// If the file is no Parquet file or has no known column. The iterator's errors are those of
/// reading on, which name the row.
pub fn records(file: File, path: &Path) -> Result<Records> {
    let name = path.display().to_string();
    let bytes = file.metadata().with_context(|| format!("cannot read {name}"))?.len();
    let not_parquet = || format!("{name} is no valid Parquet file");
    let reader = SerializedFileReader::new(file).with_context(not_parquet)?;
    let rows = reader.metadata().file_metadata().num_rows();
    let wanted = projection(reader.metadata().file_metadata().schema(), &name)?;
    let rows_of_file = reader.into_iter().project(Some(wanted)).with_context(not_parquet)?;
    // A progress bar counts bytes. A row counts as the average.
    let bytes = bytes / u64::try_from(rows).unwrap_or(0).max(1);
    let records = rows_of_file.zip(1..).map(move |(row, line)| {
        let row = row.with_context(|| format!("cannot read row {line} of {name}"))?;
        Ok(Record { line, bytes, content: Content::Value(object(&row)) })
    });
    Ok(Box::new(records))
}

/// Returns the part of a schema that has the columns to read.
fn projection(schema: &Type, name: &str) -> Result<Type> {
    let fields = schema.get_fields().iter();
    let (known, others): (Vec<_>, Vec<_>) =
        fields.cloned().partition(|field: &Arc<Type>| COLUMNS.contains(&field.name()));
    let names: Vec<_> = others.iter().map(|field| field.name()).collect();
    ensure!(
        !known.is_empty(),
        "{name} has none of the columns {}; it has {}",
        COLUMNS.join(", "),
        names.join(", ")
    );
    Ok(Type::group_type_builder(schema.name()).with_fields(known).build()?)
}

fn object(row: &ParquetRow) -> Value {
    Value::from_pairs(row.get_column_iter().map(|(name, field)| (name.clone(), value(field))))
}

/// Converts a value. Types that JSON does not have, such as dates, become strings.
fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::from(()),
        Field::Bool(value) => Value::from(*value),
        Field::Byte(value) => Value::from(*value),
        Field::Short(value) => Value::from(*value),
        Field::Int(value) => Value::from(*value),
        Field::Long(value) => Value::from(*value),
        Field::UByte(value) => Value::from(*value),
        Field::UShort(value) => Value::from(*value),
        Field::UInt(value) => Value::from(*value),
        Field::ULong(value) => Value::from(*value),
        Field::Float(value) => Value::from(f64::from(*value)),
        Field::Double(value) => Value::from(*value),
        Field::Str(value) => Value::from(value.as_str()),
        Field::Bytes(bytes) => Value::from(String::from_utf8_lossy(bytes.data())),
        Field::Group(row) => object(row),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => {
            let pairs = map.entries().iter();
            Value::from_pairs(pairs.map(|(key, entry)| (value(key), value(entry))))
        }
        other => Value::from(other.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::super::row::Row;
    use super::*;

    fn read(path: &Path) -> Result<Vec<Record>> {
        records(File::open(path).unwrap(), path)?.collect()
    }

    #[test]
    fn columns_of_the_hub_are_read() {
        let records = read(&fixture::path("chat.parquet")).unwrap();
        let lines: Vec<_> = records.iter().map(|record| record.line).collect();
        assert_eq!(lines, [1, 2, 3]);
        let Ok(Row::Chat(chat)) = records[0].parse() else { panic!() };
        // Columns of a list of structures are null where a message does not have them.
        assert_eq!(
            chat.messages[0].value().to_string(),
            "{'content': 'Grüße, how are you?', 'role': 'user'}"
        );
        assert_eq!(chat.messages.len(), 4);
        let call = "{'content': '', 'role': 'assistant', 'tool_calls': [{'function': \
                    {'arguments': {'day': 3}, 'name': 'weather'}, 'type': 'function'}]}";
        assert_eq!(chat.messages[1].value().to_string(), call);
        assert_eq!(records[1].parse().unwrap_err().kind(), "no assistant turn");
        assert_eq!(records[2].parse().unwrap_err().kind(), "unknown columns");
    }

    #[test]
    fn each_codec_is_read() {
        for codec in ["snappy", "zstd", "gzip", "none"] {
            let records = read(&fixture::path(&format!("text_{codec}.parquet"))).unwrap();
            let rows = records.iter().map(|record| record.parse().unwrap());
            let texts: Vec<_> = rows.map(|row| format!("{row:?}")).collect();
            assert_eq!(texts, ["Text(\"one\")", "Text(\"two\")"], "{codec}");
        }
    }

    #[test]
    fn other_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.parquet");
        std::fs::write(&path, "PAR1 no parquet").unwrap();
        let error = format!("{:#}", read(&path).unwrap_err());
        assert!(error.contains("a.parquet is no valid Parquet file"), "{error}");
        let error = read(&fixture::path("other.parquet")).unwrap_err().to_string();
        assert!(error.contains("has none of the columns messages, prompt"), "{error}");
        assert!(error.ends_with("it has question, answer"), "{error}");
    }
}
