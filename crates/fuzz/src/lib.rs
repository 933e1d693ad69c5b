//! Fuzz targets of the Rust crates: each takes any bytes and panics where a promise is broken.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is what a target reports with

mod draw;
mod frames;
mod pages;
mod sessions;
mod trees;

/// One target.
pub type Target = fn(&[u8]);

/// All of them, by the name that `./dev fuzz` takes and that their corpus lies under.
pub const TARGETS: [(&str, Target); 7] = [
    ("stream", frames::stream),
    ("messages", frames::messages),
    ("chronus", sessions::chronus),
    ("erofs", trees::erofs),
    ("index", pages::index),
    ("map", pages::map),
    ("requests", pages::requests),
];

/// The target of this name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS
        .iter()
        .find(|(each, _)| *each == name)
        .map(|(_, target)| *target)
}
