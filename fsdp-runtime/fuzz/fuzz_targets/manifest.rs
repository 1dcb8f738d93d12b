//! The manifest's reader takes any bytes: it refuses them, or what it read is sound.
#![no_main]

use fsdp_runtime::checkpoint::{Manifest, seal};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = Manifest::parse(bytes, "raw");
    let sealed = seal(&String::from_utf8_lossy(bytes));
    if let Ok(manifest) = Manifest::parse(sealed.as_bytes(), "sealed") {
        for (name, tensor) in manifest.tensors() {
            let held: usize = tensor.pieces.iter().map(|piece| piece.range().len()).sum();
            assert_eq!(Some(held), tensor.numel(), "{name}");
        }
        let again = Manifest::parse(manifest.to_text().as_bytes(), "again");
        let again = again.expect("what was read can be written");
        assert_eq!(again.to_text(), manifest.to_text());
    }
});
