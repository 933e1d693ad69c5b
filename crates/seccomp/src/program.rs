//! Classic BPF for the list. Instructions are put down last first, since every jump goes forward.

use std::collections::BTreeMap;

use crate::list::{List, Rule};
use crate::Error;

/// Most instructions that the kernel takes.
pub const LONGEST: usize = 4096;

const LOAD: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
const JUMP: u16 = 0x05; // BPF_JMP | BPF_JA
const EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
const AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
const ANY_BIT: u16 = 0x45; // BPF_JMP | BPF_JSET | BPF_K
const AND: u16 = 0x54; // BPF_ALU | BPF_AND | BPF_K
const RETURN: u16 = 0x06; // BPF_RET | BPF_K

const OFFSET_NUMBER: u32 = 0; // struct seccomp_data
const OFFSET_ARCHITECTURE: u32 = 4;
const OFFSET_ARGUMENTS: u32 = 16;

const ARCHITECTURE: u32 = 0xc000_003e; // AUDIT_ARCH_X86_64
const X32: u32 = 0x4000_0000; // numbers of the x32 table
const ALLOW: u32 = 0x7fff_0000;
const ERRNO: u32 = 0x0005_0000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Instruction {
    code: u16,
    when: u8,
    otherwise: u8,
    value: u32,
}

/// Where a jump goes: counted from the end of the program, so that it stays right while instructions are put before.
type Label = usize;

/// A program, complete once built.
#[derive(Debug, Clone)]
pub struct Program {
    reversed: Vec<Instruction>,
    returns: BTreeMap<u32, Label>,
}

impl Program {
    /// # Errors
    /// TooLong when the kernel would refuse it.
    pub fn new(list: &List) -> Result<Self, Error> {
        let mut program = Self {
            reversed: Vec::new(),
            returns: BTreeMap::new(),
        };
        let (default, unknown) = (ERRNO | u32::from(list.default), ERRNO | u32::from(list.unknown));
        let mut ranges = vec![];
        let highest = list.rules.keys().next_back().copied().unwrap_or(0);
        let unknown_label = program.answer(unknown);
        for number in 0..=highest {
            let label = match list.rules.get(&number) {
                None => program.answer(default),
                Some(Rule::Allow) => program.answer(ALLOW),
                Some(Rule::Refuse(errno)) => program.answer(ERRNO | u32::from(*errno)),
                Some(rule) => program.judge(rule),
            };
            match ranges.last() {
                Some(&(_, last)) if last == label => {}
                _ => ranges.push((number, label)),
            }
        }
        ranges.push((highest + 1, unknown_label));
        let tree = program.search(&ranges);
        let body = program.jump(AT_LEAST, X32, unknown_label, tree);
        let number = program.load(OFFSET_NUMBER, body);
        let check = program.jump(EQUAL, ARCHITECTURE, number, unknown_label);
        program.load(OFFSET_ARCHITECTURE, check);
        if program.reversed.len() > LONGEST {
            return Err(Error::TooLong(program.reversed.len()));
        }
        Ok(program)
    }

    /// The array of struct sock_filter.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let one = |step: &Instruction| {
            let (code, value) = (step.code.to_le_bytes(), step.value.to_le_bytes());
            [
                code[0],
                code[1],
                step.when,
                step.otherwise,
                value[0],
                value[1],
                value[2],
                value[3],
            ]
        };
        self.reversed.iter().rev().flat_map(one).collect()
    }

    fn put(&mut self, code: u16, when: u8, otherwise: u8, value: u32) -> Label {
        self.reversed.push(Instruction {
            code,
            when,
            otherwise,
            value,
        });
        self.reversed.len()
    }

    /// An instruction that falls through to `next`: directly when that is the last one put down, by a jump otherwise.
    fn before(&mut self, next: Label) {
        let distance = self.reversed.len() - next;
        if distance > 0 {
            self.put(JUMP, 0, 0, u32::try_from(distance).unwrap_or(u32::MAX));
        }
    }

    fn answer(&mut self, value: u32) -> Label {
        if let Some(&label) = self.returns.get(&value) {
            return label;
        }
        let label = self.put(RETURN, 0, 0, value);
        self.returns.insert(value, label);
        label
    }

    fn load(&mut self, offset: u32, next: Label) -> Label {
        self.before(next);
        self.put(LOAD, 0, 0, offset)
    }

    fn jump(&mut self, code: u16, value: u32, when: Label, otherwise: Label) -> Label {
        let far = |program: &Self, label: Label| program.reversed.len() + 1 - label > 255;
        // Distances are one byte; what is further away is reached through a jump put down here.
        let reach = |program: &mut Self, label: Label| {
            if far(program, label) {
                program.before(label);
                program.reversed.len()
            } else {
                label
            }
        };
        let when = reach(self, when);
        let otherwise = reach(self, otherwise);
        let distance = |label: Label| u8::try_from(self.reversed.len() - label).unwrap_or(u8::MAX);
        let (when, otherwise) = (distance(when), distance(otherwise));
        self.put(code, when, otherwise, value)
    }

    fn search(&mut self, ranges: &[(u32, Label)]) -> Label {
        match ranges {
            [] => self.answer(ERRNO | 1),
            [(_, label)] => *label,
            _ => {
                let (low, high) = ranges.split_at(ranges.len() / 2);
                let high_label = self.search(high);
                let low_label = self.search(low);
                self.jump(AT_LEAST, high[0].0, high_label, low_label)
            }
        }
    }

    fn judge(&mut self, rule: &Rule) -> Label {
        let Rule::Judge {
            argument,
            allow_values,
            refuse_values,
            refuse_masked,
            refuse_bits,
            then,
            refuse_others,
            errno,
        } = rule
        else {
            return self.answer(ALLOW);
        };
        let refuse = self.answer(ERRNO | u32::from(*errno));
        let allow = self.answer(ALLOW);
        let offset = OFFSET_ARGUMENTS + 8 * u32::from(*argument);
        let mut next = if *refuse_others { refuse } else { allow };
        if *refuse_bits != 0 {
            next = self.jump(ANY_BIT, *refuse_bits, refuse, next);
        }
        for masked in refuse_masked.iter().rev() {
            // The mask destroys the accumulator, so each test loads the argument anew.
            let after = self.load(offset, next);
            let test = self.jump(EQUAL, masked.value, refuse, after);
            self.before(test);
            self.put(AND, 0, 0, masked.mask);
            next = self.load(offset, self.reversed.len());
        }
        for &value in refuse_values.iter().rev() {
            next = self.jump(EQUAL, value, refuse, next);
        }
        next = self.allowed(allow_values, allow, next);
        if let Some(then) = then {
            let second = self.allowed(&then.allow_values, allow, refuse);
            let second = self.load(OFFSET_ARGUMENTS + 8 * u32::from(then.argument), second);
            next = self.jump(EQUAL, then.value, second, next);
        }
        self.load(offset, next)
    }

    fn allowed(&mut self, values: &[u32], allow: Label, otherwise: Label) -> Label {
        values
            .iter()
            .rev()
            .fold(otherwise, |next, &value| self.jump(EQUAL, value, allow, next))
    }
}
