//! A store in a directory, local or of a shared file system.

use std::collections::VecDeque;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use super::{Store, StoreError};
use crate::shared::lock;
use dsec_pages::format::{hex, Hash};

/// Packs kept open, since opening one on a shared file system costs a round trip.
const OPEN: usize = 64;

pub struct FileStore {
    packs: PathBuf,
    open: Mutex<VecDeque<(Hash, Arc<File>)>>,
}

impl FileStore {
    pub fn new(root: &str) -> Self {
        Self {
            packs: PathBuf::from(root).join("v2/packs"),
            open: Mutex::default(),
        }
    }

    fn pack(&self, pack: &Hash) -> Result<Arc<File>, StoreError> {
        if let Some((_, file)) = lock(&self.open).iter().find(|(name, _)| name == pack) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(File::open(self.packs.join(hex(pack))).map_err(|e| self.failed(&e))?);
        let mut open = lock(&self.open);
        if open.len() == OPEN {
            open.pop_front();
        }
        open.push_back((*pack, Arc::clone(&file)));
        Ok(file)
    }

    /// A pack that is gone while its folder is there is missing; everything else may be a shared file system that is away.
    fn failed(&self, error: &std::io::Error) -> StoreError {
        if error.kind() == ErrorKind::NotFound && self.packs.is_dir() {
            return StoreError::Missing(error.to_string());
        }
        StoreError::Away(error.to_string())
    }
}

impl Store for FileStore {
    fn read(&self, pack: &Hash, offset: u64, into: &mut [u8]) -> Result<(), StoreError> {
        let read = self.pack(pack)?.read_exact_at(into, offset);
        read.map_err(|error| {
            // What is read next is opened anew: the file may have been replaced, or its file system mounted again.
            lock(&self.open).retain(|(name, _)| name != pack);
            match error.kind() {
                ErrorKind::UnexpectedEof => StoreError::Missing("the pack is shorter".to_owned()),
                _ => self.failed(&error),
            }
        })
    }
}
