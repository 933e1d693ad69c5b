//! The files of layers that come from stores, and the pager's requests.

use dsec_pages::format::{
    map_packs, Hash, IndexReader, Place, BLOCK, HEAD, INDEX_ENTRY, MAP_ENTRY, MAX_CHUNK, MAX_PACK, PACK_NAME,
    PAGE_ENTRIES,
};
use dsec_pages::wire::{decode, read_frame};

use crate::draw::Draw;

fn head(bytes: &[u8]) -> Option<&[u8; HEAD]> {
    bytes.get(..HEAD)?.try_into().ok()
}

/// Any index, with the root that it has: its chunks lie one behind the other, none empty or too long, and cover the data.
pub fn index(data: &[u8]) {
    let Some(start) = head(data) else { return };
    let Ok(mut reader) = IndexReader::new(start, data.len() as u64) else {
        return;
    };
    let mut whole = start.to_vec();
    for page in data[HEAD..].chunks(PAGE_ENTRIES as usize * INDEX_ENTRY) {
        whole.extend(dsec_pages::format::sha256(page));
        if reader.page(page).is_err() {
            return;
        }
    }
    let root: Hash = dsec_pages::format::sha256(&whole);
    let Ok(chunks) = reader.finish(&root) else { return };
    let mut end = 0;
    for chunk in 0..chunks.len() {
        let bytes = chunks.bytes(chunk);
        assert_eq!(bytes.start, end);
        assert!(bytes.end > end && bytes.end - end <= u64::from(MAX_CHUNK) && bytes.end % BLOCK == 0);
        assert_eq!(chunks.covering(end, 1), chunk..chunk + 1);
        assert_eq!(chunks.covering(bytes.end - 1, 1), chunk..chunk + 1);
        end = bytes.end;
    }
    assert_eq!(end, chunks.data_bytes());
    assert_eq!(chunks.covering(0, u64::MAX), 0..chunks.len());
    assert!(chunks.covering(end, u64::MAX).is_empty());
}

/// Any map: what it says of a chunk lies within a pack that it names.
pub fn map(data: &[u8]) {
    let mut draw = Draw(data);
    let chunks = draw.number(1);
    let bytes = draw.0;
    let Some(start) = head(bytes) else { return };
    let Ok(packs) = map_packs(start, chunks, bytes.len() as u64) else {
        return;
    };
    let rows = &bytes[HEAD + packs as usize * PACK_NAME..];
    assert_eq!(rows.len(), chunks as usize * MAP_ENTRY);
    for row in rows.chunks_exact(MAP_ENTRY) {
        let Ok(place) = Place::parse(row.try_into().unwrap(), packs) else {
            continue;
        };
        if !place.is_zeros() {
            assert!(place.pack < packs && place.length > 0);
            assert!(u64::from(place.offset) + u64::from(place.length) <= MAX_PACK);
        }
    }
}

/// Any stream of frames: what is a request is written and read again as the same one.
pub fn requests(mut data: &[u8]) {
    while let Ok(Some(frame)) = read_frame(&mut data) {
        let Ok(request) = decode(&frame) else { continue };
        let again = request.encode().unwrap();
        let Ok(read) = decode(&again) else {
            panic!("a request is not read again: {request:?}")
        };
        assert_eq!(read.encode().unwrap(), again);
    }
}
