//! Values out of a fuzzer's bytes; zeros once they are used up.

pub struct Draw<'a>(pub &'a [u8]);

impl<'a> Draw<'a> {
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken
    }

    pub fn number(&mut self, width: usize) -> u64 {
        self.bytes(width)
            .iter()
            .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
    }

    pub fn byte(&mut self) -> u8 {
        self.number(1) as u8
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.number(2) as usize % end.max(1)
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
