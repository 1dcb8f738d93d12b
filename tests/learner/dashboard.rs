//! Burn's dashboard, in a pseudo-terminal: rank 0 shows it, and the terminal is as before at the
//! end.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use burn::train::Interrupter;
use fsdp_runtime::Error;
use fsdp_runtime::prelude::*;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use tempfile::tempdir;

use super::model::rows;
use super::run::{Run, TRAIN, learner, training};
use super::support::ranks::launch_options;

/// What the program in the terminal does.
const SCENARIO: &str = "DASHBOARD_SCENARIO";
/// Enough for several pictures, ten of which are drawn in a second.
const EPOCHS: usize = 150;
/// Sequences that enter the alternate screen, and leave it.
const ENTER: &str = "\x1b[?1049h";
const LEAVE: &str = "\x1b[?1049l";

/// The program in the terminal: a training on two ranks.
fn program(scenario: &str) {
    let folder = tempdir().unwrap();
    let (run, path) = (Run { epochs: EPOCHS, ..Run::new(2) }, folder.path().to_path_buf());
    let scenario = scenario.to_string();
    let ranks = launch(launch_options(2), move |worker| {
        let training = training(&run, &path, &worker, rows(0, TRAIN));
        let training = match scenario.as_str() {
            "error" => training.with_default_checkpointers(),
            "stopped" => training.with_interrupter(stopped()),
            _ => training,
        };
        training.launch(learner(&run, &worker)?);
        Ok::<_, Error>(())
    });
    match ranks {
        Ok(_) => println!("the run ended"),
        Err(error) => println!("the run failed: {error}"),
    }
}

fn stopped() -> Interrupter {
    let interrupter = Interrupter::new();
    interrupter.stop(Some("the operator said so"));
    interrupter
}

/// Runs the program in a terminal of 120 by 40 characters, in a process that starts this program
/// with `test` alone. Returns what it printed, and `None` in that process, after the program has run.
fn in_terminal(test: &str, scenario: &str) -> Option<String> {
    run(test, scenario, true)
}

/// Runs the program with a terminal as its output, and as its input only if `has_keyboard`.
fn run(test: &str, scenario: &str, has_keyboard: bool) -> Option<String> {
    if let Ok(scenario) = std::env::var(SCENARIO) {
        program(&scenario);
        return None;
    }
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let name = ptsname(&terminal, Vec::new()).unwrap();
    let device = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
    let size = Winsize { ws_row: 40, ws_col: 120, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(&device, size).unwrap();

    let end = || Stdio::from(OwnedFd::from(device.try_clone().unwrap()));
    let program = std::env::current_exe().unwrap();
    // A session of its own has no terminal to read from.
    let mut command = if has_keyboard { Command::new(&program) } else { Command::new("setsid") };
    if !has_keyboard {
        command.arg("--wait").arg(&program);
    }
    command
        .args(["--exact", &format!("dashboard::{test}"), "--nocapture"])
        .env(SCENARIO, scenario)
        .stdin(if has_keyboard { end() } else { Stdio::null() })
        .stdout(end())
        .stderr(end());
    let mut child = command.spawn().unwrap();
    drop(command);
    // The kernel's buffer for the terminal is small: the program waits if nobody reads.
    let reader = std::thread::spawn(move || {
        let (mut terminal, mut text) = (File::from(terminal), Vec::new());
        let mut part = [0; 4096];
        // Without an open end the read fails.
        while let Ok(count @ 1..) = terminal.read(&mut part) {
            text.extend_from_slice(&part[..count]);
        }
        String::from_utf8_lossy(&text).into_owned()
    });
    assert!(child.wait().unwrap().success());
    let modes = tcgetattr(&device).unwrap().local_modes;
    assert!(modes.contains(LocalModes::ECHO | LocalModes::ICANON), "{scenario}: {modes:?}");
    drop(device);
    Some(reader.join().unwrap())
}

fn count(text: &str, sequence: &str) -> usize {
    text.matches(sequence).count()
}

#[test]
fn rank_0_shows_a_dashboard_and_gives_the_terminal_back() {
    let test = "rank_0_shows_a_dashboard_and_gives_the_terminal_back";
    let Some(text) = in_terminal(test, "ends") else { return };
    assert_eq!((count(&text, ENTER), count(&text, LEAVE)), (1, 1), "{text:?}");
    assert!(text.contains("Loss") && text.contains("the run ended"), "{text:?}");
}

#[test]
fn the_terminal_is_restored_after_an_error() {
    let test = "the_terminal_is_restored_after_an_error";
    let Some(text) = in_terminal(test, "error") else { return };
    assert_eq!((count(&text, ENTER), count(&text, LEAVE)), (1, 1), "{text:?}");
    let after = &text[text.rfind(LEAVE).unwrap()..];
    assert!(after.contains("the run failed") && after.contains(".with_checkpoints("), "{after:?}");
}

#[test]
fn the_terminal_is_restored_after_a_stop() {
    let test = "the_terminal_is_restored_after_a_stop";
    let Some(text) = in_terminal(test, "stopped") else { return };
    assert_eq!((count(&text, ENTER), count(&text, LEAVE)), (1, 1), "{text:?}");
    assert!(text.contains("the run ended"), "{text:?}");
}

/// Under `mpirun` stdout is a terminal, but the session may have none to read keys from.
#[test]
fn a_terminal_without_a_keyboard_gets_lines() {
    let Some(text) = run("a_terminal_without_a_keyboard_gets_lines", "ends", false) else { return };
    assert_eq!(count(&text, ENTER), 0, "{text:?}");
    assert!(text.contains("Starting training") && text.contains("the run ended"), "{text:?}");
}
