//! Wrong use does not compile, and the compiler says what to write instead: one case for each rule.
//!
//! `BLESS=1 cargo test --test compile_fail` accepts new messages.
//!
//! Each case is one call of `rustc`, beside the libraries that this test was built with. Cargo names them:
//! it is asked to build this test again, with the same features, and finds everything up to date.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::available_parallelism;

use serde_json::Value;
use ui_test::spanned::Spanned;
use ui_test::status_emitter::Text;
use ui_test::{CommandBuilder, Config};

/// Fewest cases that there are.
const CASES: usize = 47;

/// Returns those of the root package's features that this test was built with.
fn features() -> Vec<&'static str> {
    macro_rules! on {
        ($($feature:literal)*) => {
            [$(($feature, cfg!(feature = $feature))),*]
        };
    }
    let features = on!(
        "flex" "train" "plot" "trace" "cpu" "wgpu" "fusion" "persistence" "cuda" "cuda-cpp" "autotune"
        "x86-v4" "mpi"
    );
    features.into_iter().filter(|(_, on)| *on).map(|(feature, _)| feature).collect()
}

/// Returns the library of each of the crates.
fn libraries(crates: [&str; 2]) -> [PathBuf; 2] {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build.args(["test", "--no-run", "--test", "compile_fail", "--message-format=json", "--locked"]);
    build.args(["--no-default-features", "--features", &features().join(",")]);
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    let built = build.stderr(Stdio::inherit()).output().expect("cargo starts");
    assert!(built.status.success(), "cargo builds this test");
    let lines = String::from_utf8(built.stdout).expect("cargo prints text");
    let artifacts: Vec<Value> =
        lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    crates.map(|name| {
        let of_crate = |artifact: &&Value| {
            artifact["target"]["name"] == name && artifact["target"]["kind"][0] == "lib"
        };
        let artifact = artifacts.iter().find(of_crate);
        let files = artifact.and_then(|artifact| artifact["filenames"].as_array());
        let file = files.and_then(|files| {
            files.iter().filter_map(Value::as_str).find(|file| file.ends_with(".rlib"))
        });
        file.unwrap_or_else(|| panic!("cargo names the library of {name}")).into()
    })
}

/// Returns the call of `rustc`, but for the file.
fn rustc() -> CommandBuilder {
    let crates = ["burn", "fsdp_runtime"];
    let libraries = libraries(crates);
    let folder = libraries[0].parent().expect("a library is in a folder");
    let mut args: Vec<_> =
        ["--edition=2024", "--emit=metadata", "--color=never"].map(String::from).into();
    args.push("--diagnostic-width=140".into());
    args.push(format!("-Ldependency={}", folder.display()));
    for (name, library) in crates.iter().zip(&libraries) {
        args.push(format!("--extern={name}={}", library.display()));
    }
    CommandBuilder {
        program: std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()).into(),
        args: args.into_iter().map(Into::into).collect(),
        out_dir_flag: Some("--out-dir".into()),
        input_file_flag: None,
        envs: Vec::new(),
        cfg_flag: None,
    }
}

#[test]
fn wrong_use_does_not_compile() {
    let cases = Path::new("tests/ui").read_dir().expect("the folder of cases").filter(|entry| {
        let path = entry.as_ref().expect("an entry can be read").path();
        path.extension().is_some_and(|extension| extension == "rs")
    });
    let cases = cases.count();
    assert!(cases >= CASES, "{cases} cases");

    let mut config = Config::dummy();
    config.root_dir = "tests/ui".into();
    config.out_dir = tempfile::tempdir().expect("a folder").keep();
    config.program = rustc();
    config.threads = available_parallelism().ok().or(NonZeroUsize::new(1));
    config.bless_command = Some("BLESS=1 cargo test --test compile_fail".into());
    if std::env::var_os("BLESS").is_some() {
        config.output_conflict_handling = ui_test::bless_output_files;
    }
    let defaults = config.comment_defaults.base();
    defaults.exit_status = Spanned::dummy(1).into();
    defaults.require_annotations = Spanned::dummy(false).into();
    // Lists of types end with the number of those that are left out, which depends on the features.
    config.stderr_filter("and [0-9]+ others", "and $$N others");
    config.stderr_filter("error: aborting due to [^\n]*\n+", "");
    config.stderr_filter("(For more|Some errors have detailed) [^\n]*\n+", "");
    let out = config.out_dir.clone();
    let ran = ui_test::run_tests_generic(
        vec![config],
        ui_test::default_file_filter,
        ui_test::default_per_file_config,
        Text::quiet(),
    );
    std::fs::remove_dir_all(out).expect("the folder can be removed");
    ran.unwrap_or_else(|error| panic!("{error:?}"));
}
