//! Any payload: a request, a reply, a boot record, or a typed error; what is decoded survives being encoded again.
#![no_main]

use dsec_proto::{decode_boot, decode_reply, decode_request, put_message, HEADER};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|payload: &[u8]| {
    if let Ok(request) = decode_request(payload) {
        let mut out = Vec::new();
        if put_message(&mut out, &request).is_ok() {
            assert_eq!(decode_request(&out[HEADER..]).ok(), Some(request));
        }
    }
    let _ = decode_reply(payload);
    let _ = decode_boot(payload);
});
