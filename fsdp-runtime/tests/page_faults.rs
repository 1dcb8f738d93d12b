//! A launch tells glibc's allocator to keep freed pages, so that the same block costs page faults
//! only once, and to have huge pages.
//!
//! The settings are those of a whole process. The binary therefore runs itself once for each way to
//! launch, and the runs launch on their main thread, as most programs do.

fn main() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    glibc::main();
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc {
    use std::env;
    use std::fs;
    use std::process::Command;

    use burn::tensor::Device;
    use fsdp_runtime::Error;
    use fsdp_runtime::prelude::*;

    /// Bytes of a block, above the largest threshold from which glibc maps blocks separately.
    const BLOCK: usize = 48 << 20;
    const PAGE: usize = 4096;
    const BLOCKS: usize = 10;
    /// Names the way to launch, for a run of this binary by itself.
    const TUNED: &str = "FSDP_TEST_TUNED";

    pub(super) fn main() {
        if let Ok(tuned) = env::var(TUNED) {
            return report(tuned == "true");
        }
        let (untuned, _) = run(false);
        let (tuned, has_huge_pages) = run(true);
        // A huge page takes one fault for 512 pages.
        let pages = (BLOCKS - 1) * BLOCK / PAGE;
        assert!(untuned >= pages / 512, "{untuned} faults without the setting");
        assert!(
            tuned < pages / 100,
            "{tuned} faults, {untuned} without the setting, {pages} pages"
        );
        assert!(tuned < untuned / 4, "{tuned} faults, {untuned} without the setting");
        assert_ne!(has_huge_pages, Some(false), "no huge pages for a tuned launch");
        println!(
            "{untuned} page faults without the setting, {tuned} with it; huge pages: {has_huge_pages:?}"
        );
    }

    /// Runs this binary with one way to launch, and an environment that does not configure the
    /// allocator. Returns what [`report`] wrote.
    fn run(tuned: bool) -> (usize, Option<bool>) {
        let mut command = Command::new(env::current_exe().unwrap());
        let output = command.env_clear().env(TUNED, tuned.to_string()).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let (faults, has_huge_pages) = text.trim().split_once(' ').unwrap();
        (faults.parse().unwrap(), has_huge_pages.parse().ok())
    }

    /// Writes the page faults of blocks on a rank, and whether they have huge pages, where the
    /// system has them.
    fn report(tuned: bool) {
        let options = LaunchOptions::new(1).with_malloc_tuning(tuned).with_device(Device::flex());
        let ranks = launch(options, |_| {
            let fill = || std::hint::black_box(vec![1_u8; BLOCK]);
            drop(fill());
            let before = page_faults();
            (1..BLOCKS).for_each(|_| drop(fill()));
            let faults = page_faults() - before;
            let block = fill();
            let has_huge_pages = asked_for_huge_pages(block.as_ptr().addr() + BLOCK / 2);
            Ok::<_, Error>((faults, has_huge_pages))
        });
        let (faults, has_huge_pages) = ranks.unwrap()[0];
        println!("{faults} {}", has_huge_pages.map_or("unknown".into(), |it| it.to_string()));
    }

    /// Returns the page faults of this process without input or output.
    fn page_faults() -> usize {
        let stat = fs::read_to_string("/proc/self/stat").unwrap();
        // The fields after the name in parentheses; the tenth field of all is `minflt`.
        let fields = stat.rsplit(')').next().unwrap();
        fields.split_whitespace().nth(7).unwrap().parse().unwrap()
    }

    /// Returns whether the system has been asked for huge pages for the mapping with this address;
    /// `None` where its kernel has none.
    fn asked_for_huge_pages(address: usize) -> Option<bool> {
        let enabled = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").ok()?;
        if enabled.contains("[never]") {
            return None;
        }
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_inside = false;
        for line in maps.lines() {
            let number = |text: &str| usize::from_str_radix(text, 16).ok();
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            if let Some((Some(start), Some(end))) = range.map(|(a, b)| (number(a), number(b))) {
                is_inside = (start..end).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| is_inside) {
                return Some(flags.split_whitespace().any(|flag| flag == "hg"));
            }
        }
        panic!("no mapping has the address {address:#x}");
    }
}
