//! Descriptors that are waited for: ends of pipes, terminals.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::io::Interest;
use tokio::time::Instant;

/// One end of a pipe, or the master of a terminal.
pub struct Stream(AsyncFd<OwnedFd>);

impl Stream {
    /// Takes the descriptor, which stops blocking.
    pub fn new(descriptor: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&descriptor, true)?;
        Ok(Self(register(descriptor)?))
    }

    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }

    /// Waits for bytes; 0 at the end. The end of a terminal is an end like another.
    pub async fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            match ready.try_io(|inner| rustix::io::read(inner.get_ref(), &mut *buffer).map_err(Into::into)) {
                Ok(result) => return end_of_terminal(result),
                Err(_would_block) => {}
            }
        }
    }

    /// Waits until a read would not block, without reading.
    pub async fn readable(&self) -> io::Result<()> {
        self.0.readable().await?.retain_ready();
        Ok(())
    }

    /// What is there now, whether or not the event loop knows of it yet; None when nothing is.
    pub fn try_read(&self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        match rustix::io::read(self.0.get_ref(), buffer) {
            Err(rustix::io::Errno::AGAIN) => {
                // Tells the event loop, so that `readable` waits for the next event.
                let _ = self
                    .0
                    .try_io(Interest::READABLE, |_| Err::<(), _>(io::ErrorKind::WouldBlock.into()));
                Ok(None)
            }
            result => end_of_terminal(result.map_err(Into::into)).map(Some),
        }
    }

    pub async fn write_all(&self, mut data: &[u8]) -> io::Result<()> {
        while !data.is_empty() {
            let mut ready = self.0.writable().await?;
            match ready.try_io(|inner| rustix::io::write(inner.get_ref(), data).map_err(Into::into)) {
                Ok(result) => data = &data[result?..],
                Err(_would_block) => {}
            }
        }
        Ok(())
    }

    /// Writes all or nothing is known to have arrived; false when it did not fit.
    pub fn try_write_all(&self, data: &[u8]) -> bool {
        rustix::io::write(self.0.get_ref(), data).is_ok_and(|size| size == data.len())
    }

    pub fn duplicate(&self) -> io::Result<Self> {
        Ok(Self(register(self.0.get_ref().try_clone()?)?))
    }
}

/// A read buffer that starts small, since most commands say little, and grows while it is filled.
#[derive(Default)]
pub struct Scratch {
    bytes: Vec<u8>,
}

const SMALL: usize = 4 * 1024;
const LARGE: usize = 256 * 1024;

impl Scratch {
    /// Room for the next read, at most `most` bytes.
    pub fn room(&mut self, most: usize) -> &mut [u8] {
        if self.bytes.is_empty() {
            self.bytes.resize(SMALL, 0);
        }
        let size = self.bytes.len().min(most);
        &mut self.bytes[..size]
    }

    /// The first `size` bytes, as read. A full buffer makes the next one larger, see `grow`.
    pub fn read(&self, size: usize) -> &[u8] {
        &self.bytes[..size]
    }

    /// To be called after a read of `size` bytes of `source` has been passed on.
    pub fn grow(&mut self, size: usize, source: &Stream) {
        if size < self.bytes.len() || size >= LARGE {
            return;
        }
        if size * 4 >= LARGE {
            // More at once costs fewer turns of everybody; where it is refused the pipe stays as it was.
            let _ = rustix::pipe::fcntl_setpipe_size(source.as_fd(), LARGE);
        }
        self.bytes = vec![0; (size * 4).min(LARGE)];
    }
}

/// Lets small pieces that come one upon another gather in the pipe: each costs aether, the edge and the client a turn,
/// whatever its size. Pieces that are large, or alone, are passed on at once.
#[derive(Default)]
pub struct Pace {
    last: Option<Instant>,
    until: Option<Instant>,
}

const SMALL_PIECE: usize = 32 * 1024;
const CLOSE: Duration = Duration::from_millis(4);
const GATHERING: Duration = Duration::from_millis(1);

impl Pace {
    /// To be called after a read of `size` bytes.
    pub fn took(&mut self, size: usize) {
        let now = Instant::now();
        let close = self.last.is_some_and(|last| now - last < CLOSE);
        self.until = (close && size < SMALL_PIECE).then(|| now + GATHERING);
        self.last = Some(now);
    }

    pub fn is_gathering(&self) -> bool {
        self.until.is_some()
    }

    /// Waits until it is time to read again; at once where nothing gathers.
    pub async fn gathered(&mut self) {
        if let Some(until) = self.until {
            tokio::time::sleep_until(until).await;
            self.until = None;
        }
    }
}

/// Watches a descriptor for the event loop.
#[expect(
    deprecated,
    reason = "unsound for types that give out different descriptors; OwnedFd never does"
)]
pub fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::new(descriptor)
}

fn end_of_terminal(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(0),
        other => other,
    }
}
