//! Carries out a plan: how the process of one sandbox comes to be.
#![forbid(unsafe_code)]
