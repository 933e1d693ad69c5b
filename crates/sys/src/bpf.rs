//! Maps of BPF by system call, through their pins, with keys and values of any size.

use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::error::{c_string, check, Error, Result};

const LOOKUP: i32 = 1;
const UPDATE: i32 = 2;
const DELETE: i32 = 3;
const GET: i32 = 7;
const INFO: i32 = 15;
const LOOKUP_BATCH: i32 = 24;
const BATCH: u32 = 1024;
/// More than any key of ours, and than the place in a hash table.
const PLACE: usize = 256;

#[repr(C)]
struct Element {
    map: u32,
    _gap: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct Batch {
    from: u64,
    to: u64,
    keys: u64,
    values: u64,
    count: u32,
    map: u32,
    flags: [u64; 2],
}

#[repr(C)]
struct Get {
    path: u64,
    fd: u32,
    flags: u32,
}

#[repr(C)]
struct Info {
    fd: u32,
    length: u32,
    info: u64,
}

/// # Safety
/// Every address in `attr` must be good for what `command` does with it.
// SAFETY: see above; callers say why.
unsafe fn bpf<T>(command: i32, attr: &mut T, what: &'static str, path: &str) -> Result<i64> {
    let size = std::mem::size_of::<T>();
    // SAFETY: the record is ours and as long as said; its addresses are good by this function's contract.
    let r = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size) };
    check(r, what, path)
}

/// A map: keys and values are bytes of its own sizes.
#[derive(Debug)]
pub struct BpfMap {
    fd: OwnedFd,
    name: String,
    key: usize,
    value: usize,
}

impl BpfMap {
    /// The map that is pinned at `path`.
    ///
    /// # Errors
    /// ENOENT where there is none.
    pub fn pinned(path: &str) -> Result<Self> {
        let text: CString = c_string("bpf get", path)?;
        let mut get = Get {
            path: text.as_ptr() as u64,
            fd: 0,
            flags: 0,
        };
        // SAFETY: the path lives past the call; on success the descriptor is new and ours.
        let fd = unsafe { OwnedFd::from_raw_fd(bpf(GET, &mut get, "bpf get", path)? as i32) };
        let mut said = [0_u32; 5];
        let mut info = Info {
            fd: fd.as_raw_fd() as u32,
            length: std::mem::size_of_val(&said) as u32,
            info: said.as_mut_ptr() as u64,
        };
        // SAFETY: the kernel writes at most the length given, which is the array's.
        unsafe { bpf(INFO, &mut info, "bpf info", path)? };
        Ok(Self {
            fd,
            name: path.to_owned(),
            key: said[2] as usize,
            value: said[3] as usize,
        })
    }

    /// Bytes of a key and of a value.
    #[must_use]
    pub fn sizes(&self) -> (usize, usize) {
        (self.key, self.value)
    }

    fn fits(&self, given: usize, wanted: usize) -> Result<()> {
        if given == wanted {
            return Ok(());
        }
        Err(Error::new("bpf", &self.name, libc::EINVAL))
    }

    fn element(&self, key: &[u8], value: u64) -> Element {
        Element {
            map: self.fd.as_raw_fd() as u32,
            _gap: 0,
            key: key.as_ptr() as u64,
            value,
            flags: 0,
        }
    }

    /// # Errors
    /// E2BIG and ENOSPC where the map is full; EINVAL for a wrong size.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Result<()> {
        self.fits(key.len(), self.key)?;
        self.fits(value.len(), self.value)?;
        let mut element = self.element(key, value.as_ptr() as u64);
        // SAFETY: both slices are as long as the map's key and value, and only read.
        unsafe { bpf(UPDATE, &mut element, "bpf update", &self.name)? };
        Ok(())
    }

    /// # Errors
    /// Anything but a key that is not there, which is None.
    pub fn get(&self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.fits(key.len(), self.key)?;
        let mut value = vec![0_u8; self.value];
        let mut element = self.element(key, value.as_mut_ptr() as u64);
        // SAFETY: the key is as long as the map's; the kernel writes one value, for which there is room.
        match unsafe { bpf(LOOKUP, &mut element, "bpf lookup", &self.name) } {
            Ok(_) => Ok(Some(value)),
            Err(error) if error.errno == libc::ENOENT => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes a key; false where it was not there.
    ///
    /// # Errors
    /// As the kernel gives them.
    pub fn remove(&self, key: &[u8]) -> Result<bool> {
        self.fits(key.len(), self.key)?;
        let mut element = self.element(key, 0);
        // SAFETY: the key is as long as the map's, and only read.
        match unsafe { bpf(DELETE, &mut element, "bpf delete", &self.name) } {
            Ok(_) => Ok(true),
            Err(error) if error.errno == libc::ENOENT => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// All there is, key and value. What changes meanwhile may be missed or come twice.
    ///
    /// # Errors
    /// As the kernel gives them.
    pub fn entries(&self) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let (mut place, mut found) = ([0_u8; PLACE], Vec::new());
        let mut keys = vec![0_u8; self.key * BATCH as usize];
        let mut values = vec![0_u8; self.value * BATCH as usize];
        let mut first = true;
        self.fits(usize::from(self.key <= PLACE), 1)?;
        loop {
            let at = place.as_mut_ptr() as u64;
            let mut batch = Batch {
                from: if first { 0 } else { at },
                to: at,
                keys: keys.as_mut_ptr() as u64,
                values: values.as_mut_ptr() as u64,
                count: BATCH,
                map: self.fd.as_raw_fd() as u32,
                flags: [0; 2],
            };
            first = false;
            // SAFETY: there is room for as many keys and values as said, and for a place.
            let done = unsafe { bpf(LOOKUP_BATCH, &mut batch, "bpf lookup batch", &self.name) };
            let count = batch.count as usize;
            let pairs = keys.chunks(self.key).zip(values.chunks(self.value)).take(count);
            match done {
                Ok(_) => found.extend(pairs.map(|(k, v)| (k.to_vec(), v.to_vec()))),
                Err(error) if error.errno == libc::ENOENT => {
                    found.extend(pairs.map(|(k, v)| (k.to_vec(), v.to_vec())));
                    return Ok(found);
                }
                Err(error) => return Err(error),
            }
        }
    }
}
