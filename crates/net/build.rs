//! Compiles the BPF programs, which are built into the library.

use std::env;
use std::error::Error;
use std::path::PathBuf;
use std::process::Command;

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR")?).join("../../bpf");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    println!("cargo:rerun-if-changed={}", root.display());
    // Debian keeps asm/ by machine, and clang does not look there for the target "bpf".
    let machine = format!("/usr/include/{}-linux-gnu", env::var("CARGO_CFG_TARGET_ARCH")?);
    for name in ["policy", "observe"] {
        let done = Command::new("clang")
            .args([
                "-O2",
                "-g",
                "-Wall",
                "-Werror",
                "-Wno-unused-function",
                "-target",
                "bpf",
                "-I",
                &machine,
                "-c",
            ])
            .arg(root.join(format!("{name}.bpf.c")))
            .arg("-o")
            .arg(out.join(format!("{name}.bpf.o")))
            .status()
            .map_err(|e| format!("clang: {e}; ./dev setup installs it"))?;
        if !done.success() {
            return Err(format!("clang cannot compile bpf/{name}.bpf.c").into());
        }
    }
    Ok(())
}
