//! Any bytes in any cut: the decoder gives the same frames and the same error as for all of them at once.
#![no_main]

use dsec_proto::{Decoder, FrameError};
use libfuzzer_sys::fuzz_target;

fn frames(parts: impl Iterator<Item = Vec<u8>>) -> (Vec<(u8, Vec<u8>)>, Option<FrameError>) {
    let (mut decoder, mut seen) = (Decoder::new(), Vec::new());
    for part in parts {
        decoder.feed(&part);
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

fuzz_target!(|data: (u8, Vec<u8>)| {
    let (cut, bytes) = data;
    let whole = frames(std::iter::once(bytes.clone()));
    let parts = frames(bytes.chunks(usize::from(cut) + 1).map(<[u8]>::to_vec));
    assert_eq!(whole, parts);
});
