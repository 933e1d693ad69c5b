//! The connection in a helper: blocking, one operation, then the helper ends.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;

use rustix::buffer::spare_capacity;
use rustix::io::Errno;

use super::Halt;
use crate::failure::Failure;

use dsec_proto::{
    header, put_message, Decoder, DoneReply, Reply, FRAME_END_OF_INPUT, FRAME_STDIN, FRAME_STDOUT, MAX_PAYLOAD,
};

/// Bytes read from the connection at once, at most.
const READ: usize = 256 * 1024;

/// The edge closed the connection or broke the protocol.
#[derive(Debug)]
pub struct Gone;

impl From<io::Error> for Gone {
    fn from(_: io::Error) -> Self {
        Self
    }
}

pub struct Wire<'a> {
    socket: &'a UnixStream,
    decoder: Decoder,
}

impl<'a> Wire<'a> {
    /// `ahead`: bytes that aether has read of the connection already.
    pub fn new(socket: &'a UnixStream, ahead: Vec<u8>) -> Self {
        let mut decoder = Decoder::new();
        decoder.feed(&ahead);
        // Ours alone now; a failure shows at the first read.
        let _ = socket.set_nonblocking(false);
        Self { socket, decoder }
    }

    pub fn socket(&self) -> &UnixStream {
        self.socket
    }

    pub fn reply(&mut self, reply: &Reply) -> Result<(), Gone> {
        let mut frame = Vec::new();
        put_message(&mut frame, reply).map_err(|_| Gone)?;
        Ok(self.socket.write_all(&frame)?)
    }

    pub fn done(&mut self) -> Result<(), Gone> {
        self.reply(&Reply::Done(DoneReply {}))
    }

    /// Sends bytes in frames.
    pub fn data(&mut self, data: &[u8]) -> Result<(), Gone> {
        for part in data.chunks(MAX_PAYLOAD) {
            let head = header(FRAME_STDOUT, part.len());
            let mut wrote = self
                .socket
                .write_vectored(&[io::IoSlice::new(&head), io::IoSlice::new(part)])?;
            if wrote < head.len() {
                self.socket.write_all(&head[wrote..])?;
                wrote = head.len();
            }
            self.socket.write_all(&part[wrote - head.len()..])?;
        }
        Ok(())
    }

    /// Input of the edge, appended to `out`; false at its end. A closed connection is no end: it is Gone.
    pub fn input(&mut self, out: &mut Vec<u8>) -> Result<bool, Gone> {
        let mut more = false;
        while !more {
            match self.decoder.next_frame() {
                Ok(Some(frame)) if frame.kind == FRAME_STDIN => {
                    out.extend_from_slice(frame.payload);
                    more = true;
                }
                Ok(Some(frame)) if frame.kind == FRAME_END_OF_INPUT => return Ok(false),
                Ok(None) => self.fill()?,
                Ok(Some(_)) | Err(_) => return Err(Gone),
            }
        }
        Ok(true)
    }

    /// Gives the whole input to `take`, part by part, without a copy.
    pub fn each(&mut self, mut take: impl FnMut(&[u8]) -> Result<(), Failure>) -> Result<(), Halt> {
        loop {
            match self.decoder.next_frame() {
                Ok(Some(frame)) if frame.kind == FRAME_STDIN => take(frame.payload)?,
                Ok(Some(frame)) if frame.kind == FRAME_END_OF_INPUT => return Ok(()),
                Ok(None) => self.fill()?,
                Ok(Some(_)) | Err(_) => return Err(Gone.into()),
            }
        }
    }

    /// Takes what the edge still sends until it closes: closing first, with input unread, would reset the connection and
    /// take from the edge the reply that lies in it.
    pub fn drop_input(&mut self) {
        loop {
            self.decoder.space().clear();
            if self.fill().is_err() {
                return;
            }
        }
    }

    fn fill(&mut self) -> Result<(), Gone> {
        let space = self.decoder.space();
        space.reserve(READ);
        loop {
            match rustix::io::read(self.socket, spare_capacity(space)) {
                Ok(0) => return Err(Gone),
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(_) => return Err(Gone),
            }
        }
    }
}

/// The input of the edge as a `Read`, for the tar decoder.
pub struct Incoming<'w, 'a> {
    wire: &'w mut Wire<'a>,
    buffer: Vec<u8>,
    at: usize,
    ended: bool,
    pub gone: bool,
}

impl<'w, 'a> Incoming<'w, 'a> {
    pub fn new(wire: &'w mut Wire<'a>) -> Self {
        Self {
            wire,
            buffer: Vec::new(),
            at: 0,
            ended: false,
            gone: false,
        }
    }
}

impl Read for Incoming<'_, '_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.at == self.buffer.len() && !self.ended {
            self.buffer.clear();
            self.at = 0;
            match self.wire.input(&mut self.buffer) {
                Ok(more) => self.ended = !more,
                Err(Gone) => {
                    self.gone = true;
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
            }
        }
        let size = out.len().min(self.buffer.len() - self.at);
        out[..size].copy_from_slice(&self.buffer[self.at..self.at + size]);
        self.at += size;
        Ok(size)
    }
}
