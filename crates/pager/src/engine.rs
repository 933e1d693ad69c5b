//! The layers that are attached, and what can be asked of them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use rustix::fs::{memfd_create, MemfdFlags};
use serde_json::{json, Value};

use crate::desk::Desk;
use crate::files::{BadLayer, Files};
use crate::layer::{Layer, Parts};
use crate::questions;
use crate::shared::{lock, Cell, Counter, Kept, COUNTERS};
use crate::source::Source;
use crate::store;
use dsec_pages::wire::{Attach, Limits, Mechanism, Refusal, StoreSpec};

/// How late an error may be for a reader whose store is away.
const TICK: Duration = Duration::from_millis(500);

/// A worker that lived this long did not die of what it began with: its successor need not wait.
const SETTLED: Duration = Duration::from_secs(10);

type Answer = Result<Value, Refusal>;

/// The attached layers, by whatever names them.
#[derive(Default)]
struct Table {
    by_hex: HashMap<String, Arc<Layer>>,
    /// Device and inode of the data file, as events tell.
    by_file: HashMap<(u64, u64), Arc<Layer>>,
    by_slot: HashMap<usize, Arc<Layer>>,
}

pub struct Engine {
    pub desk: Arc<Desk>,
    fuse_mount: PathBuf,
    table: RwLock<Table>,
    sources: Mutex<Vec<Arc<Source>>>,
    /// One change of the set of layers at a time.
    change: Mutex<()>,
}

fn local(error: impl std::fmt::Display) -> Refusal {
    Refusal::new("local", error.to_string())
}

fn bad_layer(error: BadLayer) -> Refusal {
    Refusal::new("bad_layer", error.to_string())
}

fn identity(file: impl AsFd) -> Result<(u64, u64), Refusal> {
    let stat = rustix::fs::fstat(file).map_err(local)?;
    Ok((stat.st_dev, stat.st_ino))
}

impl Engine {
    pub fn new(desk: Arc<Desk>, fuse_mount: PathBuf) -> Self {
        Self {
            desk,
            fuse_mount,
            table: RwLock::default(),
            sources: Mutex::default(),
            change: Mutex::default(),
        }
    }

    fn table(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn table_mut(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn layer(&self, hex: &str) -> Result<Arc<Layer>, Refusal> {
        let known = self.table().by_hex.get(hex).cloned();
        known.ok_or_else(|| Refusal::new("unknown_layer", hex))
    }

    pub fn all(&self) -> Vec<Arc<Layer>> {
        self.table().by_hex.values().cloned().collect()
    }

    pub fn by_slot(&self, slot: usize) -> Option<Arc<Layer>> {
        self.table().by_slot.get(&slot).cloned()
    }

    /// The layer whose data file is open as descriptor `number`.
    pub fn by_descriptor(&self, number: i32) -> Option<Arc<Layer>> {
        let key = identity(dsec_sys::borrow(number)).ok()?;
        self.table().by_file.get(&key).cloned()
    }

    fn source(&self, spec: &StoreSpec) -> Result<Arc<Source>, Refusal> {
        let mut sources = lock(&self.sources);
        let store = store::open(spec).map_err(|e| Refusal::new("bad_store", e.to_string()))?;
        if let Some(known) = sources.iter().find(|s| s.url == spec.url) {
            known.replace(store);
            return Ok(Arc::clone(known));
        }
        let source = Source::new(spec.url.clone(), store);
        sources.push(Arc::clone(&source));
        Ok(source)
    }

    /// Where to mount a layer's data from.
    fn data_path(&self, layer: &Layer) -> PathBuf {
        match layer.mechanism {
            Mechanism::Fuse if !layer.whole.load(Acquire) => self.fuse_mount.join(&layer.hex),
            Mechanism::Fuse | Mechanism::Fanotify => layer.files.path("data"),
        }
    }

    fn attached(&self, layer: &Layer) -> Answer {
        let path = self.data_path(layer);
        Ok(json!({"data_path": path.to_string_lossy(), "whole": layer.whole.load(Acquire)}))
    }

    /// Attaches a layer: from this answer on its data file may be mounted, and not before.
    pub fn attach(self: &Arc<Self>, attach: &Attach) -> Answer {
        let _one = lock(&self.change);
        if let Ok(known) = self.layer(&attach.layer) {
            if known.mechanism != attach.mechanism {
                return Err(Refusal::new("busy", "it is attached by the other mechanism"));
            }
            self.restore(&known, &attach.store)?;
            return self.attached(&known);
        }
        let files = Files::open(&attach.layer, Path::new(&attach.directory)).map_err(bad_layer)?;
        files.prepare().map_err(bad_layer)?;
        let data = files.data().map_err(bad_layer)?.into_raw_fd();
        let request = request_file(attach)?.into_raw_fd();
        let slot = self.desk.shared.keep_layer(Kept { data, request });
        let slot = slot.ok_or_else(|| Refusal::new("busy", "too many layers are attached"))?;
        let done = self.bring_up(slot, data, attach, files, true);
        if done.is_err() {
            self.desk.shared.drop_layer(slot);
            Kept { data, request }.close();
        }
        self.attached(&*done?)
    }

    fn bring_up(
        self: &Arc<Self>,
        slot: usize,
        data: i32,
        attach: &Attach,
        files: Files,
        new: bool,
    ) -> Result<Arc<Layer>, Refusal> {
        let sets = files.sets().map_err(bad_layer)?;
        let shared = &self.desk.shared;
        let watched = if new { !sets.whole } else { shared.was_watched(slot) };
        shared.set_watched(slot, watched);
        let file = File::from(rustix::io::fcntl_dupfd_cloexec(dsec_sys::borrow(data), 0).map_err(local)?);
        let parts = Parts {
            slot,
            hex: attach.layer.clone(),
            mechanism: attach.mechanism,
            limits: Limits::bounded(attach.limits),
            files,
            data: file,
            source: self.source(&attach.store)?,
            sets,
            watched_from_start: watched,
        };
        let layer = Arc::new(Layer::new(Arc::clone(&self.desk), parts));
        let key = identity(&*layer.data)?;
        // By its file first: the kernel asks from the moment that it is told to.
        self.table_mut().by_file.insert(key, Arc::clone(&layer));
        if new && watched {
            if let Err(refusal) = self.watch(&layer) {
                self.table_mut().by_file.remove(&key);
                return Err(refusal);
            }
        }
        let mut table = self.table_mut();
        table.by_hex.insert(layer.hex.clone(), Arc::clone(&layer));
        table.by_slot.insert(slot, Arc::clone(&layer));
        drop(table);
        layer.settled();
        Ok(layer)
    }

    /// Has the kernel ask before it reads the layer's data.
    fn watch(self: &Arc<Self>, layer: &Layer) -> Result<(), Refusal> {
        let unsupported = |e: dsec_sys::Error| Refusal::new("unsupported", e.to_string());
        match layer.mechanism {
            Mechanism::Fanotify => {
                let group = self.desk.group();
                let group =
                    group.ok_or_else(|| Refusal::new("unsupported", "this kernel has no pre-content events"))?;
                dsec_sys::fanotify_watch(group.as_fd(), layer.data.as_fd()).map_err(unsupported)
            }
            Mechanism::Fuse => questions::mount_fuse(self, &self.fuse_mount).map_err(unsupported),
        }
    }

    /// Takes over the layers that a worker before this one had.
    pub fn resume(self: &Arc<Self>) {
        for (slot, kept) in self.desk.shared.kept_layers() {
            let resumed = self.resume_one(slot, kept);
            if let Err(refusal) = resumed {
                eprintln!("dsec-pager: a layer cannot be taken over: {}", refusal.detail);
            }
        }
    }

    fn resume_one(self: &Arc<Self>, slot: usize, kept: Kept) -> Result<(), Refusal> {
        let file = rustix::io::fcntl_dupfd_cloexec(dsec_sys::borrow(kept.request), 0).map_err(local)?;
        let mut file = File::from(file);
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(0))
            .and_then(|_| file.read_to_end(&mut bytes))
            .map_err(local)?;
        let attach: Attach = rmp_serde::from_slice(&bytes).map_err(local)?;
        let files = Files::open(&attach.layer, Path::new(&attach.directory)).map_err(bad_layer)?;
        self.bring_up(slot, kept.data, &attach, files, false).map(drop)
    }

    /// Lets go of a layer that nothing has mounted; of one that is not attached there is nothing to let go of.
    pub fn detach(&self, hex: &str) -> Answer {
        let _one = lock(&self.change);
        let Ok(layer) = self.layer(hex) else {
            return Ok(json!({}));
        };
        layer.source().forget(&layer);
        if layer.is_busy() || self.is_mounted(&layer)? {
            return Err(Refusal::new("busy", "its data is in use"));
        }
        let mut table = self.table_mut();
        table.by_hex.remove(hex);
        table.by_slot.remove(&layer.slot);
        table.by_file.retain(|_, each| each.slot != layer.slot);
        drop(table);
        self.unwatch(&layer);
        let kept = self
            .desk
            .shared
            .kept_layers()
            .into_iter()
            .find(|(slot, _)| *slot == layer.slot);
        self.desk.shared.drop_layer(layer.slot);
        if let Some((_, kept)) = kept {
            kept.close();
        }
        Ok(json!({}))
    }

    fn unwatch(&self, layer: &Layer) {
        if let (Mechanism::Fanotify, Some(group)) = (layer.mechanism, self.desk.group()) {
            // ENOENT: it is whole and was let go of before.
            if let Err(error) = dsec_sys::fanotify_unwatch(group.as_fd(), layer.data.as_fd()) {
                if error.errno != libc::ENOENT {
                    eprintln!("dsec-pager: {error}");
                }
            }
        }
    }

    fn is_mounted(&self, layer: &Layer) -> Result<bool, Refusal> {
        let open = self.desk.shared.counter(layer.slot, Counter::Opens).load(Relaxed) > 0;
        Ok(open || !dsec_sys::only_open_here(layer.data.as_fd()).map_err(local)?)
    }

    pub fn stats(&self, hex: Option<&str>) -> Answer {
        let layers = match hex {
            Some(hex) => vec![self.layer(hex)?],
            None => self.all(),
        };
        let each: serde_json::Map<String, Value> = layers
            .iter()
            .map(|layer| (layer.hex.clone(), self.numbers(layer)))
            .collect();
        let mut totals = serde_json::Map::new();
        for name in COUNTERS
            .iter()
            .map(|(name, _)| *name)
            .chain(["present", "chunks", "bytes_present", "bytes"])
        {
            let values = each.values().filter_map(|one| one.get(name)?.as_u64());
            let total = if name == "wait_us_max" {
                values.max().unwrap_or(0)
            } else {
                values.sum()
            };
            totals.insert(name.to_owned(), total.into());
        }
        Ok(json!({"layers": each, "totals": totals, "restarts": self.desk.shared.cell(Cell::Restarts).load(SeqCst)}))
    }

    fn numbers(&self, layer: &Layer) -> Value {
        let (present, bytes_present) = layer.here();
        let source = layer.source();
        let (latency, per_byte) = source.costs();
        let mut numbers = json!({
            "chunks": layer.files.chunks.len(),
            "present": present,
            "bytes": layer.files.chunks.data_bytes(),
            "bytes_present": bytes_present,
            "whole": layer.whole.load(Acquire),
            "mechanism": layer.mechanism,
            "source": source.url,
            "request_seconds": latency,
            "bytes_per_second": if per_byte > 0.0 { 1.0 / per_byte } else { 0.0 },
            "ideal_request": source.ideal(),
        });
        for (name, counter) in COUNTERS {
            numbers[name] = self.desk.shared.counter(layer.slot, counter).load(Relaxed).into();
        }
        numbers
    }

    pub fn prefetch(&self, hex: &str, ranges: &[(u32, u32)], depth: usize) -> Answer {
        let layer = self.layer(hex)?;
        let end = layer.files.chunks.len();
        let chunks = ranges.iter().flat_map(|(from, to)| *from..(*to).min(end));
        layer.source().feed(&layer, chunks.take(end as usize * 2), depth);
        Ok(json!({}))
    }

    pub fn trace(&self, hex: &str, on: bool) -> Answer {
        Ok(json!({"chunks": self.layer(hex)?.trace(on)}))
    }

    pub fn evict(self: &Arc<Self>, hex: &str, ranges: &[(u32, u32)], mounted: bool, quiet: Duration) -> Answer {
        let _one = lock(&self.change);
        let layer = self.layer(hex)?;
        let in_use = self.is_mounted(&layer)?;
        if in_use && !mounted {
            return Err(Refusal::new("busy", "its data is in use"));
        }
        if layer.whole.load(Acquire) {
            if in_use && !layer.watched_from_start {
                return Err(Refusal::new(
                    "busy",
                    "it was whole when it was mounted, so the kernel would not ask",
                ));
            }
            self.watch(&layer)?;
            layer.become_partial().map_err(local)?;
        }
        let freed = layer
            .evict(ranges, if in_use { quiet } else { Duration::ZERO })
            .map_err(local)?;
        layer.settled();
        Ok(json!({"bytes": freed}))
    }

    pub fn restore(&self, layer: &Layer, spec: &StoreSpec) -> Result<(), Refusal> {
        let source = self.source(spec)?;
        let kept = self
            .desk
            .shared
            .kept_layers()
            .into_iter()
            .find(|(slot, _)| *slot == layer.slot);
        if let Some((_, kept)) = kept {
            let attach = Attach {
                layer: layer.hex.clone(),
                directory: layer.files.directory.to_string_lossy().into_owned(),
                store: spec.clone(),
                mechanism: layer.mechanism,
                limits: layer.limits,
            };
            let request = request_file(&attach)?.into_raw_fd();
            self.desk.shared.set_request(layer.slot, request);
            drop(dsec_sys::adopt(kept.request));
        }
        let before = std::mem::replace(
            &mut *layer.source.write().unwrap_or_else(PoisonError::into_inner),
            source,
        );
        before.wake();
        Ok(())
    }

    pub fn restore_named(&self, hex: &str, spec: &StoreSpec) -> Answer {
        let _one = lock(&self.change);
        self.restore(&*self.layer(hex)?, spec)?;
        Ok(json!({}))
    }

    /// Whether the pager may end: nothing is attached that a reader could need it for.
    pub fn may_stop(&self) -> bool {
        self.all()
            .iter()
            .all(|layer| layer.whole.load(Acquire) && !layer.is_busy())
    }

    /// Lets all that wait go, with an error, and takes the FUSE file system away.
    pub fn end(&self) {
        self.all().iter().for_each(|layer| layer.refuse_all());
        if self.desk.fuse().is_some() {
            if let Err(error) = dsec_sys::umount(&self.fuse_mount.to_string_lossy(), true) {
                eprintln!("dsec-pager: {error}");
            }
        }
    }

    /// Looks after layers for ever: makes whole ones whole, lets readers go that wait for a store that is away.
    pub fn look_after(&self) -> ! {
        let born = Instant::now();
        loop {
            self.desk.listen(TICK);
            if born.elapsed() > SETTLED {
                self.desk.shared.cell(Cell::Delay).store(0, SeqCst);
            }
            for layer in self.all() {
                if let Err(error) = self.complete(&layer) {
                    eprintln!("dsec-pager: layer {}: cannot be made whole: {error}", layer.hex);
                }
                layer.let_go();
            }
        }
    }

    fn complete(&self, layer: &Layer) -> std::io::Result<()> {
        if let Some(evictions) = layer.settle()? {
            let _one = lock(&self.change);
            if layer.become_whole(evictions)? {
                self.unwatch(layer);
            }
        }
        Ok(())
    }
}

/// A request kept where the next worker finds it, and nobody on a disk.
fn request_file(attach: &Attach) -> Result<OwnedFd, Refusal> {
    let bytes = rmp_serde::to_vec_named(attach).map_err(local)?;
    let fd = memfd_create("dsec-pager-layer", MemfdFlags::empty()).map_err(local)?;
    let mut file = File::from(fd);
    file.write_all(&bytes).map_err(local)?;
    Ok(file.into())
}
