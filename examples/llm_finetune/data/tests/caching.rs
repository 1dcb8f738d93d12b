//! Files of tokens: used again, made again where they are damaged, and different for other inputs.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::data::dataset::Conversation;
use crate::data::fixture::{CONFIG, TEMPLATE, TOKENIZER, path, tokenizer};
use crate::data::prepare::DataError;
use crate::data::{CacheUse, ChatTokenizer, Dataset, EncodeOptions, PrepareOptions, Source};

const LINES: &str = r#"{"messages":[{"role":"user","content":"Is"},{"role":"assistant","content":"Yes."}]}
{"messages":[{"role":"user","content":"Is it?"}]}
{"messages":[{"role":"bot","content":"Is it?"}]}
{"text":"It is."}
not json
{"text":"It is, it is, it is, it is, it is, it is, it is, it is, it is, it is, it is, it is."}
"#;

struct Job {
    folder: TempDir,
    options: PrepareOptions,
}

impl Job {
    fn new(lines: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("chat.jsonl");
        fs::write(&data, lines).unwrap();
        let options = PrepareOptions {
            sources: vec![Source::File(data)],
            cache: Some(folder.path().join("cache")),
            encode: EncodeOptions { max_length: 32, truncate: false, train_on_prompt: false },
            strict: false,
            quiet: true,
        };
        Self { folder, options }
    }

    fn prepare(&self) -> anyhow::Result<Dataset> {
        Dataset::prepare(&self.options, &tokenizer())
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.folder.path().join("cache"));
        entries.into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
    }
}

/// Returns ids and flags of all conversations.
fn contents(dataset: &Dataset) -> Vec<(Vec<u32>, Vec<bool>)> {
    let flags = |ids: usize, of: Conversation<'_>| (0..ids).map(|t| of.is_counted(t)).collect();
    dataset.iter().map(|c| (c.ids.to_vec(), flags(c.ids.len(), c))).collect()
}

#[test]
fn tokens_are_made_once() {
    let job = Job::new(LINES);
    let built = job.prepare().unwrap();
    assert_eq!(built.cache_use(), &CacheUse::Built);
    let read = job.prepare().unwrap();
    assert_eq!(read.cache_use(), &CacheUse::Hit);
    assert_eq!(contents(&read), contents(&built));
    assert_eq!((read.len(), read.report().accepted(), read.report().rejected()), (2, 2, 4));
    assert_eq!(read.counted(), built.counted());
    assert!(read.counted() > 0 && read.tokens() > read.counted());
    // What is printed is the same, with the names of the files.
    assert_eq!(read.report(), built.report());
    let text = read.report().to_string();
    for expected in [
        "chat.jsonl:2: the conversation has no assistant turn",
        "chat.jsonl:3: message 1: unknown role \"bot\"",
        "chat.jsonl:5: not valid JSON",
        "tokens are more than the maximum of 32",
    ] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
    assert_eq!(text.lines().count(), 4);
    assert_eq!(job.files().len(), 1);
    // Without a folder the same tokens come from a temporary file.
    let options = PrepareOptions { cache: None, ..job.options.clone() };
    assert_eq!(contents(&Dataset::prepare(&options, &tokenizer()).unwrap()), contents(&built));
}

#[test]
fn a_damaged_file_is_made_again() {
    let job = Job::new(LINES);
    let expected = contents(&job.prepare().unwrap());
    let path = job.files().remove(0);
    let whole = fs::read(&path).unwrap();
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    for (damaged, reason) in [
        (whole[..whole.len() - 1].to_vec(), "cut off"),
        (whole[..64].to_vec(), "not a file of tokens"),
        (Vec::new(), "not a file of tokens"),
        (flipped(0), "not a file of tokens"),
        (flipped(8), "not a file of tokens"),
        (flipped(12), "checksum"),
        (flipped(16), "cut off"),
        (flipped(41), "other data"),
        (flipped(100), "checksum"),
        (flipped(130), "checksum"),
        (flipped(whole.len() - 1), "checksum"),
    ] {
        fs::remove_file(&path).unwrap();
        fs::write(&path, damaged).unwrap();
        let dataset = job.prepare().unwrap();
        let CacheUse::Rebuilt(found) = dataset.cache_use() else { panic!("{reason}") };
        assert!(found.contains(reason), "{found}, not {reason}");
        assert_eq!(contents(&dataset), expected);
        assert_eq!(fs::read(&path).unwrap(), whole);
        assert_eq!(job.prepare().unwrap().cache_use(), &CacheUse::Hit);
    }
}

/// Ranks that are processes start at the same time.
#[test]
fn one_of_several_makes_the_tokens() {
    let job = Job::new(&LINES.repeat(500));
    let used = std::thread::scope(|scope| {
        let starts = [0; 4].map(|_| scope.spawn(|| job.prepare().unwrap()));
        starts.map(|start| start.join().unwrap().cache_use().clone())
    });
    let count = |wanted: CacheUse| used.iter().filter(|it| **it == wanted).count();
    assert_eq!([count(CacheUse::Built), count(CacheUse::Hit)], [1, 3], "{used:?}");
    assert_eq!(job.files().len(), 1, "the lock is gone");
}

#[test]
fn other_inputs_make_other_files() {
    let mut job = Job::new(LINES);
    job.prepare().unwrap();
    let mut files = 1;
    let mut check = |job: &Job, tokenizer: &ChatTokenizer| {
        let dataset = Dataset::prepare(&job.options, tokenizer).unwrap();
        assert_eq!(dataset.cache_use(), &CacheUse::Built);
        files += 1;
        assert_eq!(job.files().len(), files);
    };
    job.options.encode.max_length = 64;
    check(&job, &tokenizer());
    job.options.encode.train_on_prompt = true;
    check(&job, &tokenizer());
    job.options.encode.truncate = true;
    check(&job, &tokenizer());
    let template = TEMPLATE.replace("user", "person") + "\n";
    check(&job, &ChatTokenizer::from_parts(TOKENIZER, CONFIG, Some(&template)).unwrap());
    let config =
        CONFIG.replace("\"eos_token\": \"<|im_end|>\"", "\"eos_token\": \"<|endoftext|>\"");
    assert_ne!(config, CONFIG);
    check(&job, &ChatTokenizer::from_parts(TOKENIZER, &config, Some(TEMPLATE)).unwrap());
    // The first token of the generation configuration ends a text where `eos_token` is not set.
    let config = CONFIG.replace("\"eos_token\"", "\"other_token\"");
    let model = tempfile::tempdir().unwrap();
    let write = |name: &str, contents: &[u8]| fs::write(model.path().join(name), contents).unwrap();
    write("tokenizer.json", TOKENIZER);
    write("tokenizer_config.json", config.as_bytes());
    write("chat_template.jinja", TEMPLATE.as_bytes());
    for ends in ["2", "[1, 2]"] {
        write("generation_config.json", format!(r#"{{"eos_token_id":{ends}}}"#).as_bytes());
        check(&job, &ChatTokenizer::from_folder(model.path()).unwrap());
    }
    let data = job.folder.path().join("chat.jsonl");
    fs::write(&data, LINES.replace("Yes.", "No.")).unwrap();
    check(&job, &tokenizer());
    // The contents decide, not the name.
    let moved = job.folder.path().join("moved.jsonl");
    fs::rename(data, &moved).unwrap();
    job.options.sources = vec![Source::File(moved)];
    let dataset = job.prepare().unwrap();
    assert_eq!(dataset.cache_use(), &CacheUse::Hit);
    assert!(dataset.report().to_string().contains("moved.jsonl:2"));
}

#[test]
fn strict_ends_at_the_first_row_that_is_not_valid() {
    let mut job = Job::new(LINES);
    job.options.strict = true;
    let strict = |job: &Job| {
        let error = job.prepare().unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(DataError::Strict(_))), "{error:#}");
        assert!(error.to_string().contains("chat.jsonl:2: the conversation has no"), "{error:#}");
    };
    strict(&job);
    assert!(job.files().is_empty());
    // The same with tokens in the cache.
    job.options.strict = false;
    job.prepare().unwrap();
    job.options.strict = true;
    strict(&job);
}

#[test]
fn data_without_a_row_to_use_is_an_error() {
    let job = Job::new("{\"text\":\"\"}\n[]\n{\"a\":1}\n");
    let error = job.prepare().unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(DataError::AllRejected { rows: 3, .. })));
    assert!(error.to_string().contains("chat.jsonl:3: the row has neither"), "{error}");
    let error = Job::new("\n").prepare().unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(DataError::NoRows(_))), "{error}");
    let job = Job::new("x");
    fs::remove_file(job.folder.path().join("chat.jsonl")).unwrap();
    assert!(format!("{:#}", job.prepare().unwrap_err()).contains("chat.jsonl"));
}

#[test]
fn files_of_several_types_are_one_data_set() {
    let mut job = Job::new(LINES);
    job.options.encode.max_length = 512;
    job.options.sources.push(Source::File(path("text_snappy.parquet")));
    job.options.sources.push(Source::Embedded { name: "here", contents: b"{\"text\":\"a\"}\n3" });
    let dataset = job.prepare().unwrap();
    assert_eq!(dataset.len(), 3 + 2 + 1);
    let text = tokenizer().decode(dataset.get(4).ids).unwrap();
    assert_eq!(text, "two");
    assert!(dataset.report().to_string().contains("here:2: the row is a number"));
}

#[test]
fn the_embedded_corpus_is_used_without_a_rejected_row() {
    let contents = include_bytes!("../../tiny/chat.jsonl");
    let options = PrepareOptions {
        sources: vec![Source::Embedded { name: "chat.jsonl", contents }],
        cache: None,
        encode: EncodeOptions { max_length: 256, truncate: false, train_on_prompt: false },
        strict: true,
        quiet: true,
    };
    let dataset = Dataset::prepare(&options, &tokenizer()).unwrap();
    assert_eq!((dataset.len(), dataset.report().to_string()), (700, String::new()));
    let (train, held_out) = crate::data::split(&dataset, 0.1, 0).unwrap();
    let baseline = crate::data::bigram_perplexity(&train, &held_out);
    assert!(baseline > 2.0 && baseline < 20.0, "{baseline}");
    println!("{} tokens, {} counted, bigram {baseline:.3}", dataset.tokens(), dataset.counted());
}

#[test]
fn processes_that_prepare_the_same_data_do_not_disturb_each_other() {
    let job = Job::new(&LINES.repeat(200));
    let all: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| job.prepare().unwrap())).collect();
        threads.into_iter().map(|thread| contents(&thread.join().unwrap())).collect()
    });
    assert!(all.iter().all(|one| *one == all[0] && one.len() == 400));
    assert_eq!(job.files().len(), 1);
}

/// Without this, a test that compares with a file of another folder would pass by chance.
#[test]
fn folders_of_the_cache_are_created() {
    let job = Job::new(LINES);
    assert!(!Path::new(&job.folder.path().join("cache")).exists());
    job.prepare().unwrap();
    assert!(job.folder.path().join("cache").is_dir());
}
