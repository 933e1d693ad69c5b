//! The protocol between an edge and aether.

use dsec_proto::{
    decode_boot, decode_reply, decode_request, put_data, put_message, Boot, Decoder, FrameError, Reply, Request,
    FRAME_MESSAGE, FRAME_STDIN, HEADER, MAX_PAYLOAD,
};

type Seen = (Vec<(u8, Vec<u8>)>, Option<FrameError>);

fn split<'a>(parts: impl Iterator<Item = &'a [u8]>) -> Seen {
    let (mut decoder, mut seen) = (Decoder::new(), Vec::new());
    for part in parts {
        decoder.feed(part);
        loop {
            match decoder.next_frame() {
                Ok(Some(frame)) => seen.push((frame.kind, frame.payload.to_vec())),
                Ok(None) => break,
                Err(error) => return (seen, Some(error)),
            }
        }
    }
    let end = decoder.finish().err();
    (seen, end)
}

/// The first byte says how the others are cut: any cut gives the frames and the error of all of them at once. What came
/// whole is written again byte for byte.
pub fn stream(data: &[u8]) {
    let Some((&cut, bytes)) = data.split_first() else {
        return;
    };
    let whole = split(std::iter::once(bytes));
    assert_eq!(whole, split(bytes.chunks(usize::from(cut) + 1)));
    let mut again = Vec::new();
    for (kind, payload) in &whole.0 {
        assert!(payload.len() <= MAX_PAYLOAD);
        if payload.is_empty() {
            again.extend_from_slice(&dsec_proto::header(*kind, 0));
        } else {
            put_data(&mut again, *kind, payload);
        }
    }
    assert!(bytes.starts_with(&again));
    // The same bytes as data of a program: they come out as they went in.
    let mut sent = Vec::new();
    put_data(&mut sent, FRAME_STDIN, bytes);
    let (frames, error) = split(sent.chunks(usize::from(cut) + 1));
    assert!(error.is_none());
    assert_eq!(frames.concat_payloads(), bytes);
}

trait Payloads {
    fn concat_payloads(&self) -> Vec<u8>;
}

impl Payloads for Vec<(u8, Vec<u8>)> {
    fn concat_payloads(&self) -> Vec<u8> {
        self.iter().flat_map(|(_, payload)| payload.iter().copied()).collect()
    }
}

/// The payload of the one frame of `message`, or None where it is too long for one.
fn payload(put: impl FnOnce(&mut Vec<u8>) -> Result<(), FrameError>) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    put(&mut out).ok()?;
    let (mut frames, error) = split(std::iter::once(out.as_slice()));
    assert!(error.is_none() && frames.len() == 1 && frames[0].0 == FRAME_MESSAGE);
    assert_eq!(out.len(), HEADER + frames[0].1.len());
    frames.pop().map(|(_, payload)| payload)
}

/// Any payload: a request, a reply, a boot record, or a typed error. What is decoded is encoded again, in one form: the
/// second encoding is the first one, and cut short it is no message.
pub fn messages(data: &[u8]) {
    fn judge(first: Option<Vec<u8>>, again: impl Fn(&[u8]) -> Option<Vec<u8>>) {
        let Some(first) = first else {
            return;
        };
        assert_eq!(again(&first).as_deref(), Some(first.as_slice()));
        assert!(again(&first[..first.len() - 1]).is_none());
    }
    let request = |bytes: &[u8]| decode_request(bytes).ok();
    let reply = |bytes: &[u8]| decode_reply(bytes).ok();
    let boot = |bytes: &[u8]| decode_boot(bytes).ok();
    let from_request = |value: &Request| payload(|out| put_message(out, value));
    let from_reply = |value: &Reply| payload(|out| put_message(out, value));
    let from_boot = |value: &Boot| payload(|out| put_message(out, value));
    judge(request(data).and_then(|v| from_request(&v)), |b| {
        request(b).and_then(|v| from_request(&v))
    });
    judge(reply(data).and_then(|v| from_reply(&v)), |b| {
        reply(b).and_then(|v| from_reply(&v))
    });
    judge(boot(data).and_then(|v| from_boot(&v)), |b| {
        boot(b).and_then(|v| from_boot(&v))
    });
}
