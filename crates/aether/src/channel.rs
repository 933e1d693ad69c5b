//! One connection of the edge: frames in, frames out, with the socket's own back-pressure and no queue of ours.

use std::io;

use dsec_proto::{
    decode_request, put_data, put_message, Decoder, Reply, Request, FRAME_END_OF_INPUT, FRAME_MESSAGE, FRAME_STDIN,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::UnixStream;

/// Bytes read from the socket at once.
const READ: usize = 16 * 1024;
/// A send buffer above this is given back once it is empty.
const LARGE: usize = 128 * 1024;

/// What the edge sends after its request.
#[derive(Debug, PartialEq, Eq)]
pub enum Input {
    Data(Vec<u8>),
    End,
    /// The connection is closed, or what came is not the protocol.
    Closed,
}

pub struct Reader {
    half: OwnedReadHalf,
    decoder: Decoder,
}

/// Whatever waits here can be dropped without harm: what a cancelled send has not written goes first next time.
pub struct Writer {
    half: OwnedWriteHalf,
    pending: Vec<u8>,
    sent: usize,
}

/// Both directions of a connection, separate so that one can wait while the other moves.
pub struct Channel {
    pub reader: Reader,
    pub writer: Writer,
}

impl Channel {
    pub fn new(socket: UnixStream) -> Self {
        let (read, write) = socket.into_split();
        Self {
            reader: Reader {
                half: read,
                decoder: Decoder::new(),
            },
            writer: Writer {
                half: write,
                pending: Vec::new(),
                sent: 0,
            },
        }
    }

    /// Ends the operation with a reply, and takes what the edge still sends until it closes: closing first, with input
    /// unread, would reset the connection and take from the edge the reply that lies in it.
    pub async fn refuse(&mut self, reply: &Reply) {
        // The edge may be gone; it then learns nothing, as it asked for.
        if self.writer.reply(reply).await.is_ok() {
            self.reader.drop_input().await;
        }
    }

    /// The socket and what was read ahead, for a helper that carries on in a process of its own.
    pub fn take_apart(self) -> io::Result<(std::os::unix::net::UnixStream, Vec<u8>)> {
        let rest = self.reader.decoder.into_rest();
        let socket = self
            .reader
            .half
            .reunite(self.writer.half)
            .map_err(|_| io::ErrorKind::InvalidInput)?;
        Ok((socket.into_std()?, rest))
    }
}

impl Reader {
    /// The request; None when the connection closed or broke the protocol before it was whole.
    pub async fn request(&mut self) -> Option<Result<Request, String>> {
        loop {
            match self.decoder.next_frame() {
                Ok(Some(frame)) if frame.kind == FRAME_MESSAGE => {
                    return Some(decode_request(frame.payload).map_err(|error| error.to_string()));
                }
                Ok(Some(frame)) => return Some(Err(format!("frame kind {} in place of a request", frame.kind))),
                Ok(None) => {}
                Err(error) => return Some(Err(error.to_string())),
            }
            if !self.fill().await {
                return None;
            }
        }
    }

    /// The next input. `Closed` stays. Safe to drop while waiting: nothing is lost.
    pub async fn input(&mut self) -> Input {
        loop {
            match self.decoder.next_frame() {
                Ok(Some(frame)) if frame.kind == FRAME_STDIN => return Input::Data(frame.payload.to_vec()),
                Ok(Some(frame)) if frame.kind == FRAME_END_OF_INPUT => return Input::End,
                Ok(None) => {}
                Ok(Some(_)) | Err(_) => return Input::Closed,
            }
            if !self.fill().await {
                return Input::Closed;
            }
        }
    }

    /// Waits until the connection closes; input that comes meanwhile is dropped.
    pub async fn closed(&mut self) {
        while self.input().await != Input::Closed {}
    }

    async fn drop_input(&mut self) {
        loop {
            self.decoder.space().clear();
            if !self.fill().await {
                return;
            }
        }
    }

    async fn fill(&mut self) -> bool {
        let space = self.decoder.space();
        space.reserve(READ);
        matches!(self.half.read_buf(space).await, Ok(size) if size > 0)
    }
}

impl Writer {
    /// Holds a reply back until the next thing is sent, so that both go in one write.
    pub fn hold(&mut self, reply: &Reply) -> io::Result<()> {
        put_message(&mut self.pending, reply).map_err(io::Error::other)
    }

    pub async fn reply(&mut self, reply: &Reply) -> io::Result<()> {
        self.hold(reply)?;
        self.flush().await
    }

    /// Sends a frame of bytes, and what was held before it.
    pub async fn data(&mut self, kind: u8, data: &[u8]) -> io::Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        if self.pending.len() >= LARGE {
            self.flush().await?;
        }
        put_data(&mut self.pending, kind, data);
        self.flush().await
    }

    pub fn is_holding(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Drops what was held: something else is to be said instead. What is partly on its way stays.
    pub fn forget(&mut self) {
        if self.sent == 0 {
            self.pending.clear();
        }
    }

    /// Sends what was held.
    pub async fn flush(&mut self) -> io::Result<()> {
        while self.sent < self.pending.len() {
            let size = self.half.write(&self.pending[self.sent..]).await?;
            if size == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            self.sent += size;
        }
        self.sent = 0;
        self.pending.clear();
        if self.pending.capacity() > LARGE {
            self.pending = Vec::new();
        }
        Ok(())
    }
}
