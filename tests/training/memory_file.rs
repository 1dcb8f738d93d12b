//! Files of memory over time: what they say is what the accounting counts, also when a run ends with an
//! error.

use std::path::{Path, PathBuf};
use std::process::Command;

use fsdp_runtime::Mesh;
use fsdp_runtime::errors::{CollectiveError, LaunchError, RankPanic, ScheduleError};
use fsdp_runtime::memory::{Memory, MemoryFileError, MemoryForecast, MemoryTimeline};
use fsdp_runtime::optim::AdamWConfig;
use fsdp_runtime::prelude::*;
use serde_json::Value;

use crate::support::ranks::launch_options;
use crate::support::{Net, batch, loss, on_ranks};

/// Trains `steps` steps, and calls `after` after each.
fn train(
    mut net: Fsdp<Net>,
    worker: &Worker,
    steps: usize,
    mut after: impl FnMut(&Fsdp<Net>),
) -> Result<Fsdp<Net>, Error> {
    let mut optimizer = AdamWConfig::new().init();
    for step in 0..steps {
        let first = worker.rank().index() * 2;
        let (tokens, labels) = batch(step, first..first + 2, worker.device());
        let gradients = net.backward(loss(net.forward(tokens), labels))?;
        net = optimizer.step(1e-3, net, gradients);
        after(&net);
        net.stats().record_optimizer(&optimizer)?;
    }
    Ok(net)
}

fn shard(worker: &Worker, options: FsdpOptions) -> Result<(Fsdp<Net>, MemoryForecast), Error> {
    let net = Net::new(3, 0.0, worker.device());
    let mesh = Mesh::new(worker.rank(), worker.world());
    let forecast = MemoryForecast::new(&net, mesh, &options)?.with_optimizer(2);
    Ok((fully_shard(net, worker, options)?, forecast))
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&read(path)).expect("a JSON object")
}

fn bytes(value: &Value) -> usize {
    value.as_u64().expect("a number of bytes") as usize
}

/// The kinds of an object, but the total, add up to the total.
fn sum(kinds: &Value) -> usize {
    let kinds = kinds.as_object().expect("an object of kinds");
    let parts = kinds.iter().filter(|(kind, _)| *kind != "total");
    let sum: usize = parts.map(|(_, value)| bytes(value)).sum();
    assert_eq!(sum, bytes(&kinds["total"]));
    sum
}

fn assert_kinds(found: &Value, counted: Memory) {
    for (kind, usage) in counted.kinds() {
        assert_eq!(bytes(&found[kind]), usage.now, "{kind}: {found} {counted}");
    }
}

/// Checks the file of a run against what the accounting said after each step: device and host.
fn check_json(file: &Value, counted: &[(Memory, Memory)], end: (Memory, Memory)) {
    let marks = file["marks"].as_array().unwrap();
    let steps: Vec<_> = marks.iter().filter(|mark| mark["event"] == "step").collect();
    assert_eq!(steps.len(), counted.len());
    for (index, (step, (device, host))) in steps.into_iter().zip(counted).enumerate() {
        assert_eq!(step["number"], index + 1);
        assert_kinds(&step["device"], *device);
        assert_kinds(&step["host"], *host);
    }
    // The samples themselves lead to the same bytes at each mark.
    let mut levels = [file["device"]["before"].clone(), file["host"]["before"].clone()];
    let mut samples = file["samples"].as_array().unwrap().iter().enumerate().peekable();
    let mut highest = [sum(&levels[0]), sum(&levels[1])];
    let end_mark = serde_json::json!({ "samples": usize::MAX, "device": null, "host": null });
    for mark in marks.iter().chain([&end_mark]) {
        while let Some((_, sample)) =
            samples.next_if(|(index, _)| *index < mark["samples"].as_u64().unwrap() as usize)
        {
            let place = usize::from(sample["on_host"] == true);
            let kind = sample["kind"].as_str().unwrap();
            let before = bytes(&levels[place][kind]);
            let total = bytes(&levels[place]["total"]) - before + bytes(&sample["bytes"]);
            levels[place][kind] = sample["bytes"].clone();
            levels[place]["total"] = total.into();
            highest[place] = highest[place].max(total);
        }
        if mark["device"].is_object() {
            assert_eq!([&mark["device"], &mark["host"]], [&levels[0], &levels[1]]);
        }
    }
    for (place, level, counted, highest) in [
        (&file["device"], &levels[0], end.0, highest[0]),
        (&file["host"], &levels[1], end.1, highest[1]),
    ] {
        assert_kinds(level, counted);
        assert_kinds(&place["now"], counted);
        assert_eq!(bytes(&place["peak"]["total"]), counted.total.peak);
        assert_eq!(highest, counted.total.peak, "the record has the peak");
        let peak = &place["record_peak"];
        assert_eq!(bytes(&peak["bytes"]), highest);
        let holders = peak["holders"].as_array().unwrap().iter();
        assert_eq!(holders.map(|holder| bytes(&holder["bytes"])).sum::<usize>(), highest);
    }
    let now: usize = file["holders"].as_array().unwrap().iter().map(|it| bytes(&it["bytes"])).sum();
    assert_eq!(now, end.0.total.now + end.1.total.now);
}

#[test]
fn json_has_the_bytes_of_the_accounting_at_each_mark() {
    let options = [
        FsdpOptions::new(),
        FsdpOptions::new().with_strategy(ShardingStrategy::ShardGradOp),
        FsdpOptions::new().with_offload(OffloadPolicy::Params { pin_memory: false }),
        FsdpOptions::new().with_offload(OffloadPolicy::OptimizerOnly),
    ];
    for options in options.map(|options| options.with_seed(3)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_path_buf();
        let counted = on_ranks(2, move |worker| {
            let (net, forecast) = shard(worker, options.clone())?;
            let path = path.join(format!("{}.json", worker.rank()));
            let file = net.stats().memory_file(path).unwrap().with_forecast(forecast);
            let mut counted = Vec::new();
            let stats = |net: &Fsdp<Net>| (net.stats().memory(), net.stats().host_memory());
            let outcome = train(net, worker, 3, |net| counted.push(stats(net)));
            let end = stats(outcome.as_ref().unwrap());
            file.finish(&outcome).unwrap();
            Ok((counted, end, forecast))
        });
        for (rank, (counted, end, forecast)) in counted.into_iter().enumerate() {
            let file = json(&folder.path().join(format!("{rank}.json")));
            check_json(&file, &counted, end);
            assert_eq!(bytes(&file["device"]["forecast"]["total"]), forecast.total());
            assert_eq!((&file["failure"], &file["dropped_samples"]), (&Value::Null, &0.into()));
            let of = |event: &str, unit: &str| {
                let marks = file["marks"].as_array().unwrap().iter();
                marks.filter(|mark| mark["event"] == event && mark["unit"] == unit).count()
            };
            assert_eq!([of("forward", ""), of("forward", "blocks.1")], [3, 3]);
            assert_eq!([of("backward", ""), of("backward", "blocks.1")], [3, 3]);
        }
    }
}

#[test]
fn a_file_has_the_newest_changes_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory.json");
    let to = path.clone();
    on_ranks(1, move |worker| {
        let (net, _) = shard(worker, FsdpOptions::new().with_seed(3))?;
        let file = net.stats().memory_file(&to).unwrap().with_max_samples(20);
        let outcome = train(net, worker, 5, |_| {});
        file.finish(&outcome).unwrap();
        Ok(())
    });
    let file = json(&path);
    assert_eq!(file["samples"].as_array().unwrap().len(), 20);
    assert!(file["marks"].as_array().unwrap().len() <= 20);
    assert!(bytes(&file["dropped_samples"]) > 20 && bytes(&file["dropped_marks"]) > 0, "{file}");
    sum(&file["device"]["before"]);
}

/// Returns the numbers of an attribute of all elements with a name.
#[cfg(feature = "plot")]
fn attributes<'a>(svg: &'a str, element: &str, attribute: &str) -> Vec<&'a str> {
    let (element, attribute) = (format!("<{element} "), format!("{attribute}=\""));
    let value = |text: &'a str| text.split(attribute.as_str()).nth(1)?.split('"').next();
    svg.split(element.as_str()).skip(1).filter_map(value).collect()
}

/// The highest corner of an area, as a share of the height of the forecast's line.
#[cfg(feature = "plot")]
fn peak_of_forecast(svg: &str) -> f64 {
    let number = |text: &str| text.parse::<f64>().unwrap();
    let corners = attributes(svg, "polygon", "points");
    // Those of the legend are at the right.
    let corners = corners.iter().flat_map(|points| points.split(' ')).map(|corner| {
        let (x, y) = corner.split_once(',').unwrap();
        (number(x), number(y))
    });
    let heights: Vec<f64> = corners.filter(|(x, _)| *x <= 670.0).map(|(_, y)| y).collect();
    let (top, bottom) =
        heights.iter().fold((f64::MAX, f64::MIN), |(top, bottom), y| (top.min(*y), bottom.max(*y)));
    let thick = svg.lines().find(|line| line.contains("stroke-width=\"2\"")).unwrap();
    let forecast = number(attributes(thick, "line", "y1")[0]);
    (bottom - top) / (bottom - forecast)
}

#[cfg(feature = "plot")]
#[test]
fn the_peak_of_the_picture_is_the_reported_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let peaks = on_ranks(2, move |worker| {
        let (net, forecast) = shard(worker, FsdpOptions::new().with_seed(3))?;
        let path = path.join(format!("{}.svg", worker.rank()));
        let file = net.stats().memory_file(path).unwrap().with_forecast(forecast);
        let outcome = train(net, worker, 3, |_| {});
        file.finish(&outcome).unwrap();
        Ok((outcome?.stats().memory().total.peak, forecast.total()))
    });
    for (rank, (peak, forecast)) in peaks.into_iter().enumerate() {
        let svg = read(&folder.path().join(format!("{rank}.svg")));
        let (drawn, counted) = (peak_of_forecast(&svg), peak as f64 / forecast as f64);
        assert!((drawn - counted).abs() < 1e-3, "{drawn} {counted}");
        let label = format!("peak {:.2} MiB", peak as f64 / f64::from(1 << 20));
        assert!(svg.contains(&label) && svg.contains("step 3"), "{label}: {svg}");
        assert!(svg.contains("<title>forward blocks.1</title>"));
        assert!(svg.contains("<title>backward the outermost unit</title>"));
    }
}

/// Trains under a limit on the memory of rank 1, and returns the error of the run.
fn limited(folder: PathBuf, extension: &'static str) -> LaunchError {
    let ranks = launch(launch_options(2), move |worker| {
        let (net, forecast) = shard(&worker, FsdpOptions::new().with_seed(3))?;
        // What the model holds between steps fits, and a backward does not.
        let limit = net.stats().memory().total.now + 1;
        if worker.rank().index() == 1 {
            net.set_memory_limit(Some(limit));
        }
        let path = folder.join(format!("{}.{extension}", worker.rank()));
        let file = net.stats().memory_file(path).unwrap().with_forecast(forecast);
        let outcome = train(net, &worker, 2, |_| {});
        file.finish(&outcome).unwrap();
        outcome.map(|_| ())
    });
    ranks.expect_err("the limit is too low")
}

#[test]
fn a_limit_ends_the_run_and_the_error_and_the_file_name_the_largest_holders() {
    let folder = tempfile::tempdir().unwrap();
    let error = limited(folder.path().into(), "json");
    assert_eq!((error.rank.index(), error.is_out_of_memory()), (1, true), "{error}");
    let cause = error.source.downcast_ref::<Error>();
    let Some(Error::Schedule(ScheduleError::MemoryLimit { limit, used, holders })) = cause else {
        panic!("{error}");
    };
    assert!(used > limit && holders.iter().map(|(_, bytes)| bytes).sum::<usize>() <= *used);
    assert!(holders.is_sorted_by(|a, b| a.1 >= b.1) && holders.len() > 1, "{holders:?}");
    let text = error.to_string();
    for (name, bytes) in holders {
        assert!(text.contains(&format!("{name} {bytes}")), "{name}: {text}");
    }
    let file = json(&folder.path().join("1.json"));
    assert!(file["failure"].as_str().unwrap().contains("above the limit of"), "{file}");
    let (name, bytes_held) = &holders[0];
    let first = &file["device"]["record_peak"]["holders"][0];
    assert!(name.starts_with(first["kind"].as_str().unwrap()), "{name}: {first}");
    assert!(bytes(&first["bytes"]) >= *bytes_held);
    // The other rank has a file as well, with the error that reached it.
    let other = json(&folder.path().join("0.json"));
    assert!(other["failure"].as_str().unwrap().contains("rank 1 failed"), "{other}");
}

/// A forward ends the rank by unwinding, so that the program cannot pass the error to the file.
#[test]
fn a_limit_that_ends_a_forward_is_in_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("memory.json");
    let to = path.clone();
    let error = launch(launch_options(1), move |worker| {
        let (net, _) = shard(&worker, FsdpOptions::new().with_seed(3))?;
        let _file = net.stats().memory_file(&to).unwrap();
        net.set_memory_limit(Some(1));
        train(net, &worker, 1, |_| {})?;
        Ok::<_, Error>(())
    });
    let error = error.unwrap_err();
    let cause = error.source.downcast_ref::<Error>();
    let limited = matches!(cause, Some(Error::Schedule(ScheduleError::MemoryLimit { .. })));
    assert!(limited && error.is_out_of_memory(), "{error}");
    let file = json(&path);
    assert_eq!(file["failure"], error.to_string(), "{file}");
    assert!(file["device"]["record_peak"]["holders"][0]["kind"].is_string());
}

#[cfg(feature = "plot")]
#[test]
fn pictures_of_a_run_that_failed_name_the_largest_holders() {
    let folder = tempfile::tempdir().unwrap();
    for extension in ["svg", "html"] {
        let error = limited(folder.path().into(), extension);
        let cause = error.source.downcast_ref::<Error>();
        let Some(Error::Schedule(ScheduleError::MemoryLimit { holders, .. })) = cause else {
            panic!("{error}");
        };
        let page = read(&folder.path().join(format!("1.{extension}")));
        assert!(page.contains(&holders[0].0), "{}: {page}", holders[0].0);
        assert!(page.to_lowercase().contains("ended with an error: the model took"), "{page}");
    }
}

/// A limit that is not exceeded changes nothing, and may be lifted.
#[test]
fn a_limit_at_the_peak_is_kept() {
    let run = |limit: Option<usize>| {
        on_ranks(2, move |worker| {
            let (net, _) = shard(worker, FsdpOptions::new().with_seed(3))?;
            net.set_memory_limit(Some(1));
            net.set_memory_limit(limit);
            let net = train(net, worker, 2, |_| {})?;
            Ok(net.stats().memory().total.peak)
        })
    };
    let peaks = run(None);
    assert_eq!(run(peaks.iter().max().copied()), peaks);
}

#[test]
fn a_rank_that_panics_leaves_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_path_buf();
    let error = launch(launch_options(2), move |worker| {
        let (net, _) = shard(&worker, FsdpOptions::new().with_seed(3))?;
        let path = path.join(format!("{}.json", worker.rank()));
        let _file = net.stats().memory_file(path).unwrap();
        let rank = worker.rank().index();
        train(net, &worker, 2, |_| assert!(rank == 0, "out of memory, says a device"))?;
        Ok::<_, Error>(())
    });
    let error = error.unwrap_err();
    assert!(error.source.downcast_ref::<RankPanic>().is_some() && error.is_out_of_memory());
    let files = [0, 1].map(|rank| json(&folder.path().join(format!("{rank}.json"))));
    let failures = files.each_ref().map(|file| file["failure"].as_str().unwrap());
    assert!(failures[0].starts_with("the rank"), "{failures:?}");
    assert!(failures[1].starts_with("the rank panicked"), "{failures:?}");
    assert!(bytes(&files[1]["device"]["record_peak"]["bytes"]) > 0);
    let other = LaunchError::clone(&error).source.to_string();
    assert!(other.contains("says a device"), "{other}");
}

#[test]
fn another_error_is_no_lack_of_memory() {
    let fail = |worker: Worker| -> Result<(), Error> {
        Err(CollectiveError::Closed { rank: worker.rank() }.into())
    };
    let error = launch(launch_options(1), fail).unwrap_err();
    assert!(!error.is_out_of_memory(), "{error}");
}

#[test]
fn files_that_cannot_be_written_are_errors() {
    on_ranks(1, |worker| {
        let (net, _) = shard(worker, FsdpOptions::new().with_seed(3))?;
        let unknown = net.stats().memory_file("memory.png");
        assert!(matches!(unknown, Err(MemoryFileError::UnknownForm { .. })), "{unknown:?}");
        let done = Ok::<_, Error>(());
        let missing = net.stats().memory_file("no/such/folder/memory.json").unwrap();
        let error = missing.finish(&done).unwrap_err();
        assert!(matches!(error, MemoryFileError::Write { .. }), "{error}");
        let ended = net.stats().memory_file("never/written.json").unwrap();
        net.stats().stop_memory_timeline();
        let error = ended.finish(&done).unwrap_err();
        assert!(matches!(error, MemoryFileError::NotRecorded { .. }), "{error}");
        Ok(())
    });
}

#[test]
fn a_refused_forecast_has_a_file() {
    let world = fsdp_runtime::WorldSize::new(2).unwrap();
    let net = Net::new(3, 0.0, &burn::tensor::Device::flex());
    let mesh = Mesh::new(fsdp_runtime::Rank::ZERO, world);
    let forecast = MemoryForecast::new(&net, mesh, &FsdpOptions::new()).unwrap().with_optimizer(2);
    let mut timeline = MemoryTimeline::of_forecast(&forecast);
    timeline.failure = forecast.check(1).err().map(|error| error.to_string());
    let file: Value = serde_json::from_str(&timeline.to_json("refused", Some(&forecast))).unwrap();
    assert_eq!(bytes(&file["device"]["record_peak"]["bytes"]), forecast.total());
    let largest = forecast.kinds().filter(|(kind, _)| *kind != "total").max_by_key(|it| it.1);
    let first = &file["device"]["record_peak"]["holders"][0];
    assert_eq!(bytes(&first["bytes"]), largest.unwrap().1);
    assert!(file["failure"].as_str().unwrap().contains("a rank needs"));
}

/// Opens the pages of a run, and of a forecast, in a browser without a network.
#[cfg(feature = "plot")]
#[test]
fn a_page_works_in_a_browser() {
    let folder = tempfile::tempdir().unwrap();
    let offloaded = FsdpOptions::new().with_offload(OffloadPolicy::Params { pin_memory: false });
    let mut pages = Vec::new();
    for (name, options) in [("device", FsdpOptions::new()), ("host", offloaded)] {
        let path = folder.path().join(format!("{name}.html"));
        pages.push(path.clone());
        let options = options.with_seed(3);
        on_ranks(1, move |worker| {
            let (net, forecast) = shard(worker, options.clone())?;
            let file = net.stats().memory_file(&path).unwrap().with_forecast(forecast);
            let outcome = train(net, worker, 3, |_| {});
            file.finish(&outcome).unwrap();
            Ok(())
        });
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/browser.py");
    let run = match Command::new("python3").arg(script).args(pages).output() {
        Ok(run) => run,
        Err(error) => return eprintln!("skipped: python3: {error}"),
    };
    eprint!("{}", String::from_utf8_lossy(&run.stdout));
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}
