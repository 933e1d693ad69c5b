//! Carries out a plan: how the first process of one sandbox comes to be.
#![forbid(unsafe_code)]

mod cell;
mod sight;
mod steps;

pub use cell::{assemble, launch, Launched};
pub use sight::SYS_SKELETON;
pub use steps::{Cell, Extra};
