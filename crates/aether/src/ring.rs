//! The last bytes of a stream, with the offset of the first one kept.

use std::collections::VecDeque;

/// Keeps at most `limit` bytes, grown as they come.
#[derive(Debug, Default)]
pub struct Ring {
    kept: VecDeque<u8>,
    total: u64,
    limit: usize,
}

impl Ring {
    pub fn new(limit: usize) -> Self {
        Self {
            kept: VecDeque::new(),
            total: 0,
            limit,
        }
    }

    /// Appends; what is too much falls off the front. `room`: how far it may grow now; it never gives back what it has.
    pub fn push(&mut self, bytes: &[u8], room: usize) {
        self.total += bytes.len() as u64;
        let limit = self.limit.min(self.kept.len() + room);
        let bytes = &bytes[bytes.len().saturating_sub(limit)..];
        let over = (self.kept.len() + bytes.len()).saturating_sub(limit);
        self.kept.drain(..over);
        self.kept.extend(bytes);
    }

    /// Bytes ever pushed.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Offset of the first byte that is kept.
    pub fn start(&self) -> u64 {
        self.total - self.kept.len() as u64
    }

    pub fn held(&self) -> usize {
        self.kept.len()
    }

    /// Up to `most` bytes from `offset`, which is at least `start`.
    pub fn copy(&self, offset: u64, most: usize, out: &mut Vec<u8>) {
        let at = usize::try_from(offset.saturating_sub(self.start()))
            .unwrap_or(usize::MAX)
            .min(self.kept.len());
        let end = self.kept.len().min(at.saturating_add(most));
        let (front, back) = self.kept.as_slices();
        if at < front.len() {
            out.extend_from_slice(&front[at..end.min(front.len())]);
        }
        if end > front.len() {
            out.extend_from_slice(&back[at.saturating_sub(front.len())..end - front.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Ring;

    #[test]
    fn keeps_the_newest_and_counts_all() {
        let (mut ring, mut all) = (Ring::new(10), Vec::new());
        for size in [3usize, 4, 0, 5, 25, 1, 10, 2] {
            let part: Vec<u8> = (0..size).map(|at| (all.len() + at) as u8).collect();
            ring.push(&part, usize::MAX - 10);
            all.extend_from_slice(&part);
            assert_eq!(ring.total(), all.len() as u64);
            assert!(ring.held() <= 10);
            for offset in ring.start()..=ring.total() {
                let mut out = Vec::new();
                ring.copy(offset, 4, &mut out);
                let begin = offset as usize;
                assert_eq!(out, all[begin..all.len().min(begin + 4)]);
            }
        }
    }

    #[test]
    fn without_room_it_moves_on() {
        let mut ring = Ring::new(100);
        ring.push(b"abc", 3);
        ring.push(b"defgh", 0);
        let mut out = Vec::new();
        ring.copy(ring.start(), 100, &mut out);
        assert_eq!((out.as_slice(), ring.total(), ring.start()), (&b"fgh"[..], 8, 5));
    }
}
