//! Pickles that PyTorch did not write.

use super::super::mapped::MappedFile;
use super::dcp::read_checkpoint;
use super::machine::read_pickle;
use super::pickle::{Node, PickleError, Value};
use super::weights::saved_file;
use crate::error::LoadError;

fn global(bytes: &[u8]) -> String {
    match read_pickle(bytes) {
        Err(PickleError::Global(global)) => global,
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_way_to_import_a_name_is_refused_at_the_name() {
    // The bytes after the import would never be read: here they are no opcodes.
    assert_eq!(global(b"\x80\x02cos\nsystem\n\xff"), "os.system");
    assert_eq!(global(b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93\xff"), "builtins.eval");
    assert_eq!(global(b"(ios\nsystem\n\xff"), "os.system");
    assert_eq!(global(b"icollections\nOrderedDict\n"), "collections.OrderedDict");
    // Names beside those that are read.
    for (module, name) in [
        ("torch", "load"),
        ("torch", "ComplexFloatStorage"),
        ("torch", "float32.__class__"),
        ("torch._utils", "_rebuild_tensor"),
        ("collections", "OrderedDict.__class__"),
        ("torch.serialization", "load"),
        ("pathlib", "Path"),
    ] {
        let pickle = format!("c{module}\n{name}\n");
        assert_eq!(global(pickle.as_bytes()), format!("{module}.{name}"));
    }
}

#[test]
fn invalid_pickles_are_errors() {
    let long_text = [&b"\x8d"[..], &u64::MAX.to_le_bytes(), b"x"].concat();
    for (bytes, expected) in [
        (&b""[..], "ends within"),
        (b"\x80", "ends within"),
        (b"X\xff\xff\xff\xffabc", "ends within"),
        (&long_text, "ends within"),
        (b"X\x01\x00\x00\x00\xff.", "UTF-8"),
        (b"cos", "within a name"),
        (b".", "the stack is empty"),
        (b"(.", "above its last mark"),
        (b"t", "no mark"),
        (b"h\x07", "no memo 7"),
        (b"q\x00", "the stack is empty"),
        (b"Na", "container"),
        (b"]NNs", "no dict"),
        (b"}(Nu", "no dict"),
        (b"N(Ne", "container"),
        (b"\x8a\x09123456789", "9 bytes"),
        (b"P1\n", "0x50"),
        (b"\x82\x01", "0x82"),
        (b"NQ", "no storage"),
        (b"NNR", "no tuple"),
        (b"ctorch\nSize\n)R", "other arguments"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n)R", "arguments of a tensor"),
        (b"ccollections\nOrderedDict\n)\x81", "other arguments"),
        (b"K\x01Nb", "state"),
    ] {
        let Err(PickleError::Invalid(reason)) = read_pickle(bytes) else {
            panic!("{:?}", bytes.escape_ascii().to_string())
        };
        assert!(reason.contains(expected), "{}: {reason}", bytes.escape_ascii());
    }
}

#[test]
fn integers_have_their_signs() {
    let read = |bytes: &[u8]| match read_pickle(bytes).unwrap().root {
        Value::Int(number) => number,
        other => panic!("{other:?}"),
    };
    assert_eq!(read(b"K\xff."), 255);
    assert_eq!(read(b"M\xff\xff."), 65_535);
    assert_eq!(read(b"J\xff\xff\xff\xff."), -1);
    assert_eq!(read(b"\x8a\x00."), 0);
    assert_eq!(read(b"\x8a\x01\xff."), -1);
    assert_eq!(read(b"\x8a\x05\x00\x00\x00\x00\x01."), 1 << 32);
    assert_eq!(read(b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80."), i64::MIN);
}

#[test]
fn a_list_that_contains_itself_is_read() {
    let pickle = read_pickle(b"]q\x00h\x00a.").unwrap();
    let Some(Node::List(values)) = pickle.node(pickle.root) else { panic!() };
    assert_eq!(values[..], [pickle.root]);
}

/// Returns an archive of `torch.save` with this pickle, and a storage `0` of 16 bytes.
fn archive(pickle: &[u8]) -> MappedFile {
    archive_with(pickle, zip::write::SimpleFileOptions::default(), b"little")
}

fn archive_with(pickle: &[u8], options: zip::write::SimpleFileOptions, order: &[u8]) -> MappedFile {
    use std::io::Write as _;
    let options = options.compression_method(zip::CompressionMethod::Stored);
    let mut zip = zip::ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, bytes) in [("data.pkl", pickle), ("byteorder", order), ("data/0", &[0; 16])] {
        zip.start_file(format!("a/{name}"), options).unwrap();
        zip.write_all(bytes).unwrap();
    }
    MappedFile::in_memory(zip.finish().unwrap().into_inner())
}

/// Returns the opcodes of a tensor on storage `key`, with one size and stride.
fn tensor(key: &str, offset: u32, size: u32, stride: u32) -> Vec<u8> {
    let number = |number: u32| [&b"J"[..], &number.to_le_bytes()].concat();
    let text = |text: &str| [&b"\x8c"[..], &[text.len() as u8], text.as_bytes()].concat();
    let id = [
        &b"("[..],
        &text("storage"),
        b"ctorch\nFloatStorage\n",
        &text(key),
        &text("cpu"),
        b"K\x04tQ",
    ];
    let shape = [&number(size)[..], b"\x85", &number(stride), b"\x85"].concat();
    let arguments = [&b"("[..], &id.concat(), &number(offset), &shape, b"\x89)t"].concat();
    [&b"ctorch._utils\n_rebuild_tensor_v2\n"[..], &arguments, b"R"].concat()
}

/// Returns the pickle of a dict with one entry `w`.
fn dict(value: &[u8]) -> Vec<u8> {
    [&b"\x80\x02}\x8c\x01w"[..], value, b"s."].concat()
}

#[test]
fn tensors_that_do_not_lie_in_their_storage_are_errors() {
    let read = |value: Vec<u8>| saved_file("f", &archive(&dict(&value)));
    assert_eq!(read(tensor("0", 1, 3, 1)).unwrap()["w"].shape, [3]);
    for wrong in [
        tensor("0", 2, 3, 1),
        tensor("0", 0, 5, 1),
        tensor("0", 0, 2, 4),
        tensor("0", i32::MAX as u32, 1, 1),
        tensor("0", 0, i32::MAX as u32, i32::MAX as u32),
        tensor("0", 0, u32::MAX, 1), // -1
        tensor("1", 0, 1, 1),
        tensor("../0", 0, 1, 1),
    ] {
        let error = read(wrong).unwrap_err();
        assert!(matches!(error, LoadError::Format { .. }), "{error}");
    }
    let big = archive_with(&dict(&tensor("0", 0, 1, 1)), Default::default(), b"big");
    assert!(saved_file("f", &big).unwrap_err().to_string().contains("little-endian"));
}

#[test]
fn dicts_within_dicts_without_end_are_an_error() {
    // A dict that contains itself.
    let error = saved_file("f", &archive(b"}q\x00\x8c\x01ah\x00s.")).unwrap_err();
    assert!(error.to_string().contains("without end"), "{error}");
    // Each dict contains the one before it ten times: 10^30 names.
    let mut bomb = b"}q\x00".to_vec();
    for level in 0..30u8 {
        bomb.push(b'}');
        for key in 0..10u8 {
            bomb.extend([b'K', key, b'h', level, b's']);
        }
        bomb.extend([b'q', level + 1]);
    }
    bomb.push(b'.');
    let error = saved_file("f", &archive(&bomb)).unwrap_err();
    assert!(error.to_string().contains("without end"), "{error}");
}

#[test]
fn metadata_of_a_checkpoint_name_files_of_its_folder_only() {
    let metadata = include_bytes!("../../../../tests/torch/dcp/.metadata");
    let outside = replace(metadata, b"__1_0.distcp", b"../../../etc");
    let opened = std::cell::Cell::new(0);
    let mut open = |name: &str| {
        opened.set(opened.get() + 1);
        Err(LoadError::Io { file: name.into(), reason: "not opened".into() })
    };
    let error = read_checkpoint("f", &outside, &mut open).unwrap_err();
    assert!(error.to_string().contains("`../../../etc`, of `model."), "{error}");
    let error = read_checkpoint("f", metadata, &mut open).unwrap_err();
    assert!(matches!(error, LoadError::Io { .. }), "{error}");
    assert_eq!(opened.get(), 1);
    let unsafe_class = replace(metadata, b"MetadataIndex", b"MetadataXndex");
    let error = read_checkpoint("f", &unsafe_class, &mut open).unwrap_err();
    assert!(matches!(&error, LoadError::UnsafePickle { .. }), "{error}");
}

/// Replaces the only place of a text by one of the same length.
fn replace(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let at = bytes.windows(from.len()).position(|window| window == from).unwrap();
    [&bytes[..at], to, &bytes[at + from.len()..]].concat()
}
