//! Requests over a network, from threads that wait for them.

use std::future::Future;
use std::sync::OnceLock;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use super::StoreError;

pub const CONNECT: Duration = Duration::from_secs(5);
/// The longest that one request may take: 4 MiB at 200 KiB a second.
pub const REQUEST: Duration = Duration::from_secs(20);

static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();

fn runtime() -> Result<&'static Runtime, StoreError> {
    let made = RUNTIME.get_or_init(|| Builder::new_multi_thread().worker_threads(1).enable_all().build().ok());
    made.as_ref()
        .ok_or_else(|| StoreError::Away("no thread for the network".to_owned()))
}

/// Carries out a request on the calling thread, within its time.
pub fn within<F: Future>(request: F) -> Result<F::Output, StoreError> {
    let limited = async { tokio::time::timeout(REQUEST, request).await };
    runtime()?
        .block_on(limited)
        .map_err(|_| StoreError::Away("no answer in time".to_owned()))
}
