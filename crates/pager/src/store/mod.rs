//! Where packs are read from.

mod file;
mod network;
mod oci;
mod s3;

use std::sync::Arc;

use dsec_pages::format::Hash;
use dsec_pages::wire::StoreSpec;
use thiserror::Error;

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
    if spec.url.starts_with("s3://") {
        return Ok(Arc::new(s3::S3Store::new(spec)?));
    }
    if spec.url.starts_with("oci://") {
        return Ok(Arc::new(oci::OciStore::new(spec)?));
    }
    Err(bad("no such kind of store; there are file://, s3:// and oci://"))
}
