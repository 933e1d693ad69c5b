//! Any cut of a stream gives the same frames; forged and truncated ones give typed errors.
#![allow(clippy::unwrap_used)]

use dsec_proto::*;
use proptest::prelude::*;

fn collect(decoder: &mut Decoder, out: &mut Vec<(u8, Vec<u8>)>) -> Result<(), FrameError> {
    while let Some(frame) = decoder.next_frame()? {
        out.push((frame.kind, frame.payload.to_vec()));
    }
    Ok(())
}

fn frames() -> impl Strategy<Value = Vec<(u8, Vec<u8>)>> {
    let data = (0u8..=3, prop::collection::vec(any::<u8>(), 0..300));
    prop::collection::vec(prop_oneof![data, Just((FRAME_END_OF_INPUT, Vec::new()))], 0..12)
}

proptest! {
    #[test]
    fn any_cut_gives_the_same_frames(list in frames(), cuts in prop::collection::vec(1usize..64, 1..40)) {
        let mut stream = Vec::new();
        for (kind, payload) in &list {
            stream.extend_from_slice(&header(*kind, payload.len()));
            stream.extend_from_slice(payload);
        }
        let (mut decoder, mut seen, mut at, mut turn) = (Decoder::new(), Vec::new(), 0, 0);
        while at < stream.len() {
            let end = stream.len().min(at + cuts[turn % cuts.len()]);
            decoder.feed(&stream[at..end]);
            collect(&mut decoder, &mut seen).unwrap();
            (at, turn) = (end, turn + 1);
        }
        prop_assert_eq!(decoder.finish(), Ok(()));
        prop_assert_eq!(seen, list);
    }

    #[test]
    fn arbitrary_bytes_never_panic_and_stay_bounded(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let mut decoder = Decoder::new();
        decoder.feed(&bytes);
        let mut seen = Vec::new();
        let result = collect(&mut decoder, &mut seen);
        let total: usize = seen.iter().map(|(_, payload)| payload.len()).sum();
        prop_assert!(total <= bytes.len());
        if result.is_ok() {
            let taken: usize = seen.iter().map(|(_, payload)| payload.len() + HEADER).sum();
            prop_assert_eq!(decoder.finish().is_ok(), taken == bytes.len());
        }
        let _ = decode_request(&bytes);
        let _ = decode_reply(&bytes);
        let _ = decode_boot(&bytes);
    }

    #[test]
    fn requests_survive(path in ".*", user in ".*", offset in any::<u64>(), length in any::<Option<u64>>()) {
        let request = Request::FileRead(FileReadRequest { path, user, offset, length });
        let mut out = Vec::new();
        put_message(&mut out, &request).unwrap();
        let mut decoder = Decoder::new();
        decoder.feed(&out);
        let payload = decoder.next_frame().unwrap().unwrap().payload.to_vec();
        prop_assert_eq!(decode_request(&payload).unwrap(), request);
        for cut in 0..payload.len() {
            prop_assert!(decode_request(&payload[..cut]).is_err());
        }
    }
}

#[test]
fn forged_frames_have_typed_errors() {
    let judge = |bytes: &[u8]| {
        let mut decoder = Decoder::new();
        decoder.feed(bytes);
        decoder.next_frame().map(|frame| frame.is_some())
    };
    assert_eq!(judge(&[0, 0, 0, 0]), Err(FrameError::Empty));
    assert_eq!(
        judge(&[255, 255, 255, 255]),
        Err(FrameError::TooLong(u32::MAX as usize))
    );
    assert_eq!(judge(&header(9, 10)), Err(FrameError::UnknownKind(9)));
    assert_eq!(
        judge(&header(FRAME_END_OF_INPUT, 3)),
        Err(FrameError::EndWithPayload(3))
    );
    assert_eq!(judge(&header(FRAME_STDIN, MAX_PAYLOAD)), Ok(false));
    assert!(judge(&header(FRAME_STDIN, MAX_PAYLOAD + 1)).is_err());
}

#[test]
fn a_stream_that_ends_inside_a_frame_says_so() {
    let mut decoder = Decoder::new();
    decoder.feed(&header(FRAME_STDIN, 10));
    assert_eq!(decoder.next_frame(), Ok(None));
    assert_eq!(decoder.finish(), Err(FrameError::Truncated(HEADER)));
}

#[test]
fn a_message_above_the_limit_is_refused_and_leaves_nothing() {
    let mut out = vec![7];
    let long = Reply::Failed(FailedReply {
        code: String::new(),
        detail: "x".repeat(MAX_PAYLOAD),
        what: String::new(),
    });
    assert!(matches!(put_message(&mut out, &long), Err(FrameError::TooLong(_))));
    assert_eq!(out, [7]);
}

#[test]
fn bytes_behind_a_message_are_refused() {
    let mut out = Vec::new();
    put_message(&mut out, &Request::ListProcesses(ListProcessesRequest {})).unwrap();
    out.push(0xc0);
    assert!(matches!(decode_request(&out[HEADER..]), Err(FrameError::Message(_))));
}

#[test]
fn deep_nesting_is_refused() {
    let deep = vec![0x91u8; 100_000];
    assert!(decode_request(&deep).is_err());
}
