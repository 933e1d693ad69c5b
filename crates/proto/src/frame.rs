//! Frames: u32 little-endian length of what follows, u8 kind, payload. Bytes in, frames out; the caller does the I/O.

use serde::{de::DeserializeOwned, Serialize};

use crate::{Reply, Request, FRAME_END_OF_INPUT, FRAME_MESSAGE, FRAME_STDIN, MAX_PAYLOAD};

/// Bytes of a frame before its payload.
pub const HEADER: usize = 5;

/// Why bytes are not a frame of the protocol. None of these can be recovered from: the connection is to be closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {0} bytes is above the limit")]
    TooLong(usize),
    #[error("a frame without a kind")]
    Empty,
    #[error("unknown frame kind {0}")]
    UnknownKind(u8),
    #[error("end_of_input carries {0} bytes")]
    EndWithPayload(usize),
    #[error("the stream ended inside a frame, {0} bytes into it")]
    Truncated(usize),
    #[error("not a message: {0}")]
    Message(String),
}

/// One frame; the payload is borrowed from the decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    pub kind: u8,
    pub payload: &'a [u8],
}

/// Puts bytes together to frames. Holds at most what was fed and not yet taken.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
}

impl Decoder {
    pub fn new() -> Self {
        Self::default()
    }

    /// Append what was read from the stream.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.compact();
        self.buffer.extend_from_slice(bytes);
    }

    /// The buffer to read into directly, after what is already there. Taken frames are dropped from it first.
    pub fn space(&mut self) -> &mut Vec<u8> {
        self.compact();
        &mut self.buffer
    }

    fn compact(&mut self) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        if self.buffer.is_empty() && self.buffer.capacity() > 4 * 1024 {
            self.buffer = Vec::new();
        }
    }

    /// The next whole frame, or None while more bytes are needed. An error stays: the stream cannot be followed further.
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>, FrameError> {
        let rest = &self.buffer[self.start..];
        let Some(header) = rest.first_chunk::<4>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*header) as usize;
        if length == 0 {
            return Err(FrameError::Empty);
        }
        if length - 1 > MAX_PAYLOAD {
            return Err(FrameError::TooLong(length));
        }
        // The kind is judged as soon as it is there, so that a forged stream does not make us wait for its payload.
        let Some(&kind) = rest.get(4) else {
            return Ok(None);
        };
        if kind > FRAME_END_OF_INPUT {
            return Err(FrameError::UnknownKind(kind));
        }
        if kind == FRAME_END_OF_INPUT && length != 1 {
            return Err(FrameError::EndWithPayload(length - 1));
        }
        if rest.len() < 4 + length {
            return Ok(None);
        }
        let begin = self.start + HEADER;
        self.start += 4 + length;
        Ok(Some(Frame {
            kind,
            payload: &self.buffer[begin..self.start],
        }))
    }

    /// To be asked at the end of the stream: an error when it ended inside a frame.
    pub fn finish(&self) -> Result<(), FrameError> {
        match self.buffer.len() - self.start {
            0 => Ok(()),
            left => Err(FrameError::Truncated(left)),
        }
    }

    /// What was fed and not yet taken, for handing the stream over to another reader.
    pub fn into_rest(mut self) -> Vec<u8> {
        self.buffer.split_off(self.start)
    }
}

/// The header of a frame of `length` payload bytes; the caller keeps `length` at or below MAX_PAYLOAD.
pub fn header(kind: u8, length: usize) -> [u8; HEADER] {
    let size = (length as u32).wrapping_add(1).to_le_bytes();
    [size[0], size[1], size[2], size[3], kind]
}

/// Append a frame of bytes; data longer than MAX_PAYLOAD becomes several.
pub fn put_data(out: &mut Vec<u8>, kind: u8, data: &[u8]) {
    for part in data.chunks(MAX_PAYLOAD) {
        out.extend_from_slice(&header(kind, part.len()));
        out.extend_from_slice(part);
    }
}

/// Append a message frame. An error when the message is longer than MAX_PAYLOAD.
pub fn put_message<T: Serialize>(out: &mut Vec<u8>, message: &T) -> Result<(), FrameError> {
    let begin = out.len();
    out.extend_from_slice(&[0; HEADER]);
    let mut writer = rmp_serde::Serializer::new(&mut *out).with_struct_map();
    if let Err(error) = message.serialize(&mut writer) {
        out.truncate(begin);
        return Err(FrameError::Message(error.to_string()));
    }
    let length = out.len() - begin - HEADER;
    if length > MAX_PAYLOAD {
        out.truncate(begin);
        return Err(FrameError::TooLong(length));
    }
    out[begin..begin + HEADER].copy_from_slice(&header(FRAME_MESSAGE, length));
    Ok(())
}

fn decode<T: DeserializeOwned>(payload: &[u8]) -> Result<T, FrameError> {
    let mut rest = payload;
    let mut reader = rmp_serde::Deserializer::new(&mut rest);
    reader.set_max_depth(32);
    let message = T::deserialize(&mut reader).map_err(|error| FrameError::Message(error.to_string()))?;
    drop(reader);
    if !rest.is_empty() {
        return Err(FrameError::Message(format!("{} bytes behind the message", rest.len())));
    }
    Ok(message)
}

/// The request in the payload of a message frame.
pub fn decode_request(payload: &[u8]) -> Result<Request, FrameError> {
    decode(payload)
}

/// The reply in the payload of a message frame.
pub fn decode_reply(payload: &[u8]) -> Result<Reply, FrameError> {
    decode(payload)
}

/// The boot record in the memfd of the launcher.
pub fn decode_boot(bytes: &[u8]) -> Result<crate::Boot, FrameError> {
    decode(bytes)
}

/// Frames that an edge may send after its request.
pub fn is_input(kind: u8) -> bool {
    kind == FRAME_STDIN || kind == FRAME_END_OF_INPUT
}
