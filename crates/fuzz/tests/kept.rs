//! Every target over its kept corpus and over mutations of it, the same ones every time.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

use dsec_fuzz::TARGETS;

const MUTATIONS: u64 = 4000;

/// xorshift64*: enough for choosing what to spoil.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33) as usize % end.max(1)
    }
}

fn spoilt(random: &mut Random, seeds: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = seeds[random.below(seeds.len())].clone();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len() + 1);
        match random.below(5) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, random.below(256) as u8),
            2 => {
                let other = &seeds[random.below(seeds.len())];
                bytes.splice(at..at, other[random.below(other.len() + 1)..].iter().take(200).copied());
            }
            _ if at < bytes.len() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff, random.below(256) as u8][random.below(6)],
            _ => bytes.extend((0..random.below(300)).map(|_| random.below(256) as u8)),
        }
    }
    bytes
}

fn corpus(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fuzz/corpus")
        .join(name)
}

#[test]
fn every_target_holds_over_its_corpus_and_what_is_near_it() {
    for (name, target) in TARGETS {
        let mut files: Vec<_> = fs::read_dir(corpus(name))
            .unwrap()
            .map(|each| each.unwrap().path())
            .collect();
        files.sort();
        let seeds: Vec<_> = files.iter().map(|file| fs::read(file).unwrap()).collect();
        assert!(seeds.len() > 3, "{name}: a corpus of {}", seeds.len());
        seeds.iter().for_each(|seed| target(seed));
        let mut random = Random(0x9E37_79B9_7F4A_7C15);
        (0..MUTATIONS).for_each(|_| target(&spoilt(&mut random, &seeds)));
    }
}
