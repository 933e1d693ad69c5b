//! A layer's files on the local disk: what is checked before anything of it is served.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use dsec_sys::Mapping;
use rustix::fs::{Mode, OFlags};
use serde::Deserialize;
use thiserror::Error;

use crate::bits::Bits;
use dsec_pages::format::{
    map_packs, sha256, unhex, Chunks, FormatError, Hash, IndexReader, Place, HEAD, INDEX_ENTRY, MAP_ENTRY, PACK_NAME,
    PAGE_ENTRIES,
};

/// The set of chunks that are here, of a layer that is not whole.
const HAVE: &str = "have";
/// The same of a whole one, for when some of it is evicted.
const HAVE_ALL: &str = "have.all";
const MAX_MANIFEST: u64 = 16 * 1024 * 1024;

/// Why a layer cannot be attached.
#[derive(Debug, Error)]
pub enum BadLayer {
    #[error("{0}: {1}")]
    Io(String, io::Error),
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("manifest: {0}")]
    Manifest(String),
}

#[derive(Deserialize)]
struct Blob {
    size: u64,
}

#[derive(Deserialize)]
struct Manifest {
    schema_version: u64,
    hash_root: String,
    data: Blob,
}

fn at<T>(path: &Path, result: io::Result<T>) -> Result<T, BadLayer> {
    result.map_err(|e| BadLayer::Io(path.to_string_lossy().into_owned(), e))
}

fn open(path: &Path) -> Result<File, BadLayer> {
    at(
        path,
        OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path),
    )
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

fn head(file: &File, path: &Path) -> Result<([u8; HEAD], u64), BadLayer> {
    let mut head = [0; HEAD];
    let length = at(path, file.metadata())?.len();
    at(path, file.read_exact_at(&mut head, 0))?;
    Ok((head, length))
}

/// What `Files::sets` answers.
pub struct Sets {
    pub present: Bits,
    pub doubt: Bits,
    pub whole: bool,
}

/// A layer's index and map, mapped; where its chunks begin.
pub struct Files {
    pub directory: PathBuf,
    pub chunks: Chunks,
    index: Mapping,
    map: Mapping,
    packs: u32,
}

impl Files {
    /// Opens and checks the layer `hex` in `directory`: the manifest by the layer's name, the index by the manifest, the map for
    /// what it may say.
    pub fn open(hex: &str, directory: &Path) -> Result<Self, BadLayer> {
        let manifest = manifest(hex, directory)?;
        let bad = |why: &str| BadLayer::Manifest(why.to_owned());
        let root = manifest.hash_root.strip_prefix("sha256:").and_then(unhex);
        let root = root.ok_or_else(|| bad("hash_root is no sha256"))?;
        let (index, chunks) = index(directory, &root)?;
        if chunks.data_bytes() != manifest.data.size {
            return Err(bad("its data has another size than the index says"));
        }
        let (map, packs) = map(directory, &chunks)?;
        Ok(Self {
            directory: directory.to_owned(),
            chunks,
            index,
            map,
            packs,
        })
    }

    pub fn hash(&self, chunk: u32) -> Hash {
        self.index
            .copy(HEAD + chunk as usize * INDEX_ENTRY + 4)
            .unwrap_or_default()
    }

    /// Where a chunk lies; None where the map says what cannot be (it was changed since it was checked).
    pub fn place(&self, chunk: u32) -> Option<Place> {
        let at = HEAD + self.packs as usize * PACK_NAME + chunk as usize * MAP_ENTRY;
        Place::parse(&self.map.copy(at)?, self.packs).ok()
    }

    pub fn pack(&self, number: u32) -> Option<Hash> {
        self.map.copy(HEAD + number as usize * PACK_NAME)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Makes `data` (sparse) where it is missing or of a wrong length, and says first, in `have`, that nothing of it is here.
    pub fn prepare(&self) -> Result<(), BadLayer> {
        let data = self.path("data");
        let size = self.chunks.data_bytes();
        if fs::symlink_metadata(&data).is_ok_and(|m| m.is_file() && m.len() == size) {
            return Ok(());
        }
        for name in [HAVE, "doubt"] {
            let path = self.path(name);
            at(&path, remove(&path))?;
            at(&path, Bits::open(&path, self.chunks.len()))?;
        }
        at(&data, remove(&data))?;
        let file = at(
            &data,
            OpenOptions::new().write(true).create_new(true).mode(0o644).open(&data),
        )?;
        at(&data, file.set_len(size))
    }

    /// The data file, opened to write holes full. Close-on-exec is off: it must outlive a worker.
    ///
    /// Opened before the file is watched, so that what is done through it raises no questions.
    pub fn data(&self) -> Result<OwnedFd, BadLayer> {
        let path = self.path("data");
        let flags = OFlags::RDWR | OFlags::NOFOLLOW;
        at(&path, rustix::fs::open(&path, flags, Mode::empty()).map_err(Into::into))
    }

    /// Which chunks are here, which were before the host last went down and are to be checked, and whether the layer is whole:
    /// one with data and no `have`.
    pub fn sets(&self) -> Result<Sets, BadLayer> {
        let count = self.chunks.len();
        let bits = |name: &str| {
            let path = self.path(name);
            at(&path, Bits::open(&path, count))
        };
        let whole = !self.path(HAVE).exists();
        let present = bits(if whole { HAVE_ALL } else { HAVE })?;
        let doubt = bits("doubt")?;
        if whole {
            for chunk in 0..count {
                present.set(chunk);
            }
        }
        let boot = at(
            Path::new("boot_id"),
            fs::read_to_string("/proc/sys/kernel/random/boot_id"),
        )?;
        let stamp = self.path("have.boot");
        if fs::read_to_string(&stamp).ok().as_deref() != Some(&boot) {
            if !whole {
                // Each step leaves a chunk in one of the two sets, wherever it is cut.
                for chunk in present.iter() {
                    doubt.set(chunk);
                    present.clear(chunk);
                }
            }
            at(&stamp, fs::write(&stamp, boot))?;
        }
        Ok(Sets { present, doubt, whole })
    }

    /// Says on the disk that all of the data is here (`whole`), or that some of it may not be.
    pub fn declare(&self, whole: bool) -> io::Result<()> {
        let (from, to) = if whole { (HAVE, HAVE_ALL) } else { (HAVE_ALL, HAVE) };
        fs::rename(self.path(from), self.path(to))?;
        File::open(&self.directory)?.sync_all()
    }
}

fn manifest(hex: &str, directory: &Path) -> Result<Manifest, BadLayer> {
    let path = directory.join("manifest.json");
    let mut bytes = Vec::new();
    at(&path, open(&path)?.take(MAX_MANIFEST).read_to_end(&mut bytes))?;
    if unhex(hex) != Some(sha256(&bytes)) {
        return Err(BadLayer::Manifest("it is not the layer's".to_owned()));
    }
    let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|e| BadLayer::Manifest(e.to_string()))?;
    if manifest.schema_version != 2 {
        return Err(BadLayer::Manifest(format!(
            "schema_version {} is not 2",
            manifest.schema_version
        )));
    }
    Ok(manifest)
}

fn index(directory: &Path, root: &Hash) -> Result<(Mapping, Chunks), BadLayer> {
    let path = directory.join("index");
    let mut file = open(&path)?;
    let (head, length) = head(&file, &path)?;
    let mut reader = IndexReader::new(&head, length)?;
    at(&path, io::Seek::seek(&mut file, io::SeekFrom::Start(HEAD as u64)))?;
    let mut left = length - HEAD as u64;
    let mut page = vec![0; PAGE_ENTRIES as usize * INDEX_ENTRY];
    while left > 0 {
        let size = left.min(page.len() as u64) as usize;
        at(&path, file.read_exact(&mut page[..size]))?;
        reader.page(&page[..size])?;
        left -= size as u64;
    }
    Ok((mapped(&file, &path, length)?, reader.finish(root)?))
}

fn map(directory: &Path, chunks: &Chunks) -> Result<(Mapping, u32), BadLayer> {
    let path = directory.join("map");
    let file = open(&path)?;
    let (head, length) = head(&file, &path)?;
    let packs = map_packs(&head, chunks.len().into(), length)?;
    let map = mapped(&file, &path, length)?;
    for chunk in 0..chunks.len() as usize {
        let at = HEAD + packs as usize * PACK_NAME + chunk * MAP_ENTRY;
        let entry = map.copy(at).ok_or(FormatError::Short("map"))?;
        Place::parse(&entry, packs)?;
    }
    Ok((map, packs))
}

fn mapped(file: &File, path: &Path, length: u64) -> Result<Mapping, BadLayer> {
    let mapped = Mapping::new(file, length as usize, false);
    at(path, mapped.map_err(|e| io::Error::from_raw_os_error(e.errno)))
}
