//! Where packs are read from.

mod file;

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::format::Hash;

/// Why a range of a pack could not be had.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The store answers, and has no such pack, or a shorter one. Asking again is of little use.
    #[error("the store has no such bytes: {0}")]
    Missing(String),
    /// The store cannot be asked, or refuses. Asking again may help.
    #[error("the store is away: {0}")]
    Away(String),
}

/// A store that cannot be opened as it is named.
#[derive(Debug, Error)]
#[error("store {url}: {why}")]
pub struct BadStore {
    pub url: String,
    pub why: String,
}

/// A store as the server names it. Secrets are never written down, and Debug does not show them.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StoreSpec {
    pub url: String,
    #[serde(default)]
    pub endpoint: Option<String>,
    #[serde(default)]
    pub region: Option<String>,
    #[serde(default)]
    pub access_key: Option<String>,
    #[serde(default)]
    pub secret_key: Option<String>,
    #[serde(default)]
    pub token: Option<String>,
    #[serde(default)]
    pub username: Option<String>,
    #[serde(default)]
    pub password: Option<String>,
    #[serde(default)]
    pub allow_http: bool,
}

impl std::fmt::Debug for StoreSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoreSpec")
            .field("url", &self.url)
            .finish_non_exhaustive()
    }
}

/// Ranges of packs, read by any number of threads at once.
pub trait Store: Send + Sync {
    /// Fills `into` with the pack's bytes from `offset` on.
    ///
    /// # Errors
    /// As `StoreError` says.
    fn read(&self, pack: &Hash, offset: u64, into: &mut [u8]) -> Result<(), StoreError>;
}

/// # Errors
/// A URL of no known kind, or one whose options are wrong.
pub fn open(spec: &StoreSpec) -> Result<Arc<dyn Store>, BadStore> {
    let bad = |why: &str| BadStore {
        url: spec.url.clone(),
        why: why.to_owned(),
    };
    if let Some(path) = spec.url.strip_prefix("file://") {
        if !path.starts_with('/') {
            return Err(bad("the path is not absolute"));
        }
        return Ok(Arc::new(file::FileStore::new(path)));
    }
    Err(bad("no such kind of store; there is file://"))
}
