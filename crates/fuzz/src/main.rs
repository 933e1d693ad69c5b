//! The target that DSEC_FUZZ names, under libFuzzer; arguments are libFuzzer's.
#![forbid(unsafe_code)]
#![no_main]

use std::sync::OnceLock;

use dsec_fuzz::{target, Target};
use libfuzzer_sys::fuzz_target;

static CHOSEN: OnceLock<Target> = OnceLock::new();

fn chosen() -> Target {
    let name = std::env::var("DSEC_FUZZ").unwrap_or_default();
    target(&name).unwrap_or_else(|| panic!("DSEC_FUZZ={name:?} names no target"))
}

fuzz_target!(|data: &[u8]| CHOSEN.get_or_init(chosen)(data));
