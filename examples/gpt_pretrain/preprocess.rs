//! `gpt_pretrain preprocess`: converts texts of any size to files of word pieces, in parallel. The
//! arguments have the names of fairseq-preprocess, and the files its format.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use indicatif::ProgressBar;
use rayon::prelude::*;

use crate::bpe::{Bpe, Gpt2Files};
use crate::common::parse::positive;
use crate::common::report::set_template;
use crate::data::TOKENIZER;
use crate::reader::{ChunkReader, held_out_from};
use crate::token_index::{IdType, MAGIC, VERSION};

/// Bytes of text that one thread encodes at a time. A longer line is cut.
const CHUNK: u64 = 1 << 20;
/// Chunks in memory for each thread.
const CHUNKS_PER_WORKER: usize = 2;
/// Bytes from which the word pieces are learned, at most.
const LEARN: u64 = 64 << 20;

/// Arguments of `gpt_pretrain preprocess`.
#[derive(Args, Clone, Debug)]
pub struct PreprocessArgs {
    /// UTF-8 text files to train on, joined in order
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    pub trainpref: Vec<PathBuf>,

    /// UTF-8 text files to evaluate on [default: the last tenth of --trainpref]
    #[arg(long, value_name = "FILE", num_args = 1..)]
    pub validpref: Vec<PathBuf>,

    /// Directory to write the files to
    #[arg(long, value_name = "DIR")]
    pub destdir: PathBuf,

    /// Number of threads [default: one for each core]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub workers: Option<usize>,

    /// Number of word pieces to learn, from the first 64 MiB of the text; those of --arch are 512 for
    /// tiny and 50272 for the others
    #[arg(long, value_name = "N", default_value_t = 50_272)]
    pub vocabulary: usize,

    #[command(flatten)]
    pub gpt2: Gpt2Files,

    /// Show no progress
    #[arg(long)]
    pub quiet: bool,
}

/// Sequence of texts in fairseq's format.
struct Writer {
    data: BufWriter<File>,
    index: PathBuf,
    ids: IdType,
    lengths: Vec<u32>,
    bytes: Vec<u8>,
}

/// Converts the texts, and prints how many word pieces they have.
///
/// # Errors
///
/// If a text cannot be read or is not UTF-8, or if a file cannot be written.
pub fn preprocess(args: &PreprocessArgs) -> Result<()> {
    let bar = progress(args)?;
    let summary = convert(args, &bar)?;
    bar.finish_and_clear();
    if !args.quiet {
        println!("{summary}");
    }
    Ok(())
}

/// Converts the texts, and returns a line that says how many word pieces they have. `bar` advances by
/// the bytes of each chunk.
fn convert(args: &PreprocessArgs, bar: &ProgressBar) -> Result<String> {
    let folder = &args.destdir;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create {}", folder.display()))?;
    let held_out = args.validpref.is_empty();
    let size = size_of(&args.trainpref)?;
    let split = if held_out { held_out_from(size) } else { size };
    let bpe = match args.gpt2.read()? {
        Some(bpe) => bpe,
        None => learn(&args.trainpref, split, args.vocabulary)?,
    };
    let workers = args.workers.unwrap_or_else(|| {
        std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get)
    });
    let pool = rayon::ThreadPoolBuilder::new().num_threads(workers).build()?;
    let chunks = workers * CHUNKS_PER_WORKER;
    let write = |reader: &mut ChunkReader, name: &str, end: Option<u64>| {
        let mut writer = Writer::create(&folder.join(name), IdType::of(bpe.vocabulary()))?;
        loop {
            let texts = reader.chunks(chunks, CHUNK, end)?;
            if texts.is_empty() {
                return writer.finish();
            }
            let encode = |text: &String| bpe.encode(text);
            let ids = pool.install(|| texts.par_iter().map(encode).collect::<Vec<_>>());
            for ids in ids {
                writer.text(&ids?)?;
            }
            bar.inc(texts.iter().map(|text| text.len() as u64).sum());
        }
    };
    let mut reader = ChunkReader::open(&args.trainpref, bpe.is_gpt2())?;
    let train = write(&mut reader, "train", held_out.then_some(split))?;
    if !held_out {
        reader = ChunkReader::open(&args.validpref, bpe.is_gpt2())?;
    }
    let valid = write(&mut reader, "valid", None)?;
    bpe.save(&folder.join(TOKENIZER))?;
    let (folder, kinds) = (folder.display(), bpe.vocabulary());
    Ok(format!("{folder}: {train} word pieces to train on, {valid} held out, {kinds} kinds"))
}

/// Returns a progress bar in bytes, if standard error is a terminal.
fn progress(args: &PreprocessArgs) -> Result<ProgressBar> {
    if args.quiet || !std::io::stderr().is_terminal() {
        return Ok(ProgressBar::hidden());
    }
    let bar = ProgressBar::new(size_of(&args.trainpref)? + size_of(&args.validpref)?);
    set_template(&bar, "{bar:30} {bytes}/{total_bytes}  {bytes_per_sec}  (left {eta})");
    Ok(bar)
}

/// Learns word pieces from the beginning of the texts, up to `split`.
fn learn(files: &[PathBuf], split: u64, vocabulary: usize) -> Result<Bpe> {
    let mut reader = ChunkReader::open(files, false)?;
    let text = reader.chunk(split.min(LEARN), Some(split.min(LEARN)))?;
    Bpe::train(&text.unwrap_or_default(), vocabulary)
}

fn size_of(files: &[PathBuf]) -> Result<u64> {
    let mut size = 0;
    for file in files {
        let context = || format!("cannot read the text {}", file.display());
        size += std::fs::metadata(file).with_context(context)?.len();
    }
    Ok(size)
}

impl Writer {
    /// Starts `path` with `.bin`. A file with `.idx` is removed, so that an incomplete conversion has
    /// none.
    fn create(path: &Path, ids: IdType) -> Result<Self> {
        let (data, index) = (path.with_extension("bin"), path.with_extension("idx"));
        match std::fs::remove_file(&index) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot replace {}", index.display()));
            }
            _ => {}
        }
        let file = File::create(&data);
        let file = file.with_context(|| format!("cannot write {}", data.display()))?;
        let (lengths, bytes) = (Vec::new(), Vec::new());
        Ok(Self { data: BufWriter::new(file), index, ids, lengths, bytes })
    }

    fn text(&mut self, ids: &[u32]) -> Result<()> {
        self.bytes.clear();
        self.ids.write(ids, &mut self.bytes);
        self.data.write_all(&self.bytes).context("cannot write the word pieces")?;
        self.lengths.push(u32::try_from(ids.len())?);
        Ok(())
    }

    /// Writes the index, and returns the number of word pieces.
    fn finish(mut self) -> Result<u64> {
        self.data.flush().context("cannot write the word pieces")?;
        let mut index = MAGIC.to_vec();
        index.extend(VERSION.to_le_bytes());
        index.push(self.ids.code());
        index.extend((self.lengths.len() as u64).to_le_bytes());
        index.extend(self.lengths.iter().flat_map(|length| length.to_le_bytes()));
        let mut count = 0;
        for length in &self.lengths {
            index.extend((count * self.ids.size() as u64).to_le_bytes());
            count += u64::from(*length);
        }
        std::fs::write(&self.index, index)
            .with_context(|| format!("cannot write {}", self.index.display()))?;
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};
    use crate::data::Data;
    use crate::text::Text;
    use crate::tokens::Tokens;

    fn all(tokens: &Tokens) -> Vec<u32> {
        tokens.read(0..tokens.len()).unwrap()
    }

    fn args(flags: &[&str]) -> PreprocessArgs {
        let cli = Cli::parse_from([&["gpt_pretrain", "preprocess", "--quiet"], flags].concat());
        let Some(Command::Preprocess(args)) = cli.command else { panic!("the subcommand") };
        args
    }

    /// The book has several chunks.
    #[test]
    fn files_have_the_word_pieces_of_the_text_in_memory() {
        let home = tempfile::tempdir().unwrap();
        let book = Text::embedded().unwrap();
        let file = home.path().join("book.txt");
        std::fs::write(&file, book.train + &book.held_out).unwrap();
        let file = file.to_str().unwrap();
        let folder = home.path().join("data-bin");
        let folder = folder.to_str().unwrap();
        for workers in ["1", "3"] {
            let flags = ["--trainpref", file, "--destdir", folder, "--vocabulary", "300"];
            preprocess(&args(&[&flags[..], &["--workers", workers]].concat())).unwrap();
            let read = |data: &str| {
                let flags = ["gpt_pretrain", data, "--bpe-cache", "none"];
                Data::read(&Cli::parse_from(flags), 300).unwrap()
            };
            let (files, memory) = (read(folder), read(file));
            assert!(matches!(files.train, Tokens::File(_)));
            assert_eq!(all(&files.train), all(&memory.train));
            assert_eq!(all(&files.held_out), all(&memory.held_out));
            assert_eq!(files.vocabulary, memory.vocabulary);
            let some = files.train.read(1000..1100).unwrap();
            assert_eq!(some, all(&memory.train)[1000..1100]);
        }
        let small = Data::read(&Cli::parse_from(["gpt_pretrain", folder]), 299).unwrap_err();
        assert!(small.to_string().contains("larger --arch"), "{small}");
    }

    /// The bar counts each byte of the texts once, whichever of them are held out.
    #[test]
    fn the_progress_ends_at_the_size_of_the_texts() {
        let home = tempfile::tempdir().unwrap();
        let book = Text::embedded().unwrap();
        let (train, held_out) = (home.path().join("train.txt"), home.path().join("valid.txt"));
        std::fs::write(&train, &book.train).unwrap();
        std::fs::write(&held_out, &book.held_out).unwrap();
        let train_flags = ["--trainpref", train.to_str().unwrap(), "--vocabulary", "300"];
        let folder = ["--destdir", home.path().to_str().unwrap()];
        let valid_flags = ["--validpref", held_out.to_str().unwrap()];
        for (valid_flags, size) in [
            (&[][..], book.train.len()),
            (&valid_flags[..], book.train.len() + book.held_out.len()),
        ] {
            let args = args(&[&train_flags[..], &folder, valid_flags].concat());
            let bar = ProgressBar::hidden();
            convert(&args, &bar).unwrap();
            assert_eq!(bar.position(), size as u64, "{valid_flags:?}");
        }
    }

    /// The index of fairseq's `MMapIndexedDataset` for the texts `[5, 6, 7]` and `[8]` in `uint16`,
    /// from its `Index.writer`.
    #[test]
    fn the_format_is_fairseqs() {
        let home = tempfile::tempdir().unwrap();
        let path = home.path().join("train");
        let mut writer = Writer::create(&path, IdType::of(300)).unwrap();
        writer.text(&[5, 6, 7]).unwrap();
        writer.text(&[8]).unwrap();
        assert_eq!(writer.finish().unwrap(), 4);
        let index = std::fs::read(path.with_extension("idx")).unwrap();
        let expected = [
            &b"MMIDIDX\0\0"[..],
            &[1, 0, 0, 0, 0, 0, 0, 0],
            &[8],
            &[2, 0, 0, 0, 0, 0, 0, 0],
            &[3, 0, 0, 0, 1, 0, 0, 0],
            &[0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0],
        ];
        assert_eq!(index, expected.concat());
        let data = std::fs::read(path.with_extension("bin")).unwrap();
        assert_eq!(data, [5, 0, 6, 0, 7, 0, 8, 0]);
        assert_eq!(all(&Tokens::open(&path, 9).unwrap()), [5, 6, 7, 8]);
        let large = Tokens::open(&path, 8).unwrap().read(2..4).unwrap_err().to_string();
        assert!(large.contains("the id 8") && large.contains("8 word pieces"), "{large}");
        for (cut, expected) in [(20, "cut off"), (index.len() - 1, "do not fit")] {
            std::fs::write(path.with_extension("idx"), &index[..cut]).unwrap();
            let error = format!("{:#}", Tokens::open(&path, 9).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
        std::fs::write(path.with_extension("idx"), &index).unwrap();
        std::fs::write(path.with_extension("bin"), &data[..6]).unwrap();
        let error = format!("{:#}", Tokens::open(&path, 9).unwrap_err());
        assert!(error.contains("preprocess the text again"), "{error}");
    }
}
