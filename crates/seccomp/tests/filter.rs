//! The compiled program against the list, run by a small interpreter of classic BPF.
#![allow(clippy::unwrap_used)]

use dsec_seccomp::{compile, Error, List, Program, Rule};
use std::str::FromStr;
use syscalls::x86_64::Sysno;

const TEXT: &str = include_str!("../../../schema/seccomp.toml");
const ALLOW: u32 = 0x7fff_0000;
const ERRNO: u32 = 0x0005_0000;

fn run(program: &[u8], architecture: u32, number: u32, arguments: [u64; 6]) -> (u32, usize) {
    let mut data = [0u8; 64];
    data[0..4].copy_from_slice(&number.to_le_bytes());
    data[4..8].copy_from_slice(&architecture.to_le_bytes());
    for (at, argument) in arguments.iter().enumerate() {
        data[16 + at * 8..24 + at * 8].copy_from_slice(&argument.to_le_bytes());
    }
    let (mut at, mut accumulator, mut steps) = (0usize, 0u32, 0);
    loop {
        let step = &program[at * 8..at * 8 + 8];
        let code = u16::from_le_bytes([step[0], step[1]]);
        let (when, otherwise) = (step[2] as usize, step[3] as usize);
        let value = u32::from_le_bytes([step[4], step[5], step[6], step[7]]);
        (at, steps) = (at + 1, steps + 1);
        let mut branch = |hit: bool| at += if hit { when } else { otherwise };
        match code {
            0x20 => accumulator = u32::from_le_bytes(data[value as usize..value as usize + 4].try_into().unwrap()),
            0x05 => at += value as usize,
            0x15 => branch(accumulator == value),
            0x35 => branch(accumulator >= value),
            0x45 => branch(accumulator & value != 0),
            0x54 => accumulator &= value,
            0x06 => return (value, steps),
            other => panic!("code {other}"),
        }
    }
}

fn call(name: &str, arguments: [u64; 6]) -> u32 {
    let number = Sysno::from_str(name).unwrap().id() as u32;
    run(&compile(TEXT).unwrap(), 0xc000_003e, number, arguments).0
}

#[test]
fn every_number_is_judged_as_listed_and_quickly() {
    let (list, program) = (List::parse(TEXT).unwrap(), compile(TEXT).unwrap());
    let highest = *list.rules.keys().next_back().unwrap();
    for number in 0..highest + 200 {
        let (answer, steps) = run(&program, 0xc000_003e, number, [u64::MAX >> 32; 6]);
        assert!(steps < 40, "{number} takes {steps} steps");
        match list.rules.get(&number) {
            Some(Rule::Allow) => assert_eq!(answer, ALLOW),
            Some(Rule::Refuse(errno)) => assert_eq!(answer, ERRNO | u32::from(*errno)),
            Some(Rule::Judge { .. }) => {}
            None if number > highest => assert_eq!(answer, ERRNO | 38),
            None => assert_eq!(answer, ERRNO | 1),
        }
        assert_eq!(run(&program, 0x4000_0003, number, [0; 6]).0, ERRNO | 38);
        assert_eq!(run(&program, 0xc000_003e, number | 0x4000_0000, [0; 6]).0, ERRNO | 38);
    }
}

#[test]
fn arguments_are_judged() {
    let first = |value| [value, 0, 0, 0, 0, 0];
    let second = |value| [3, value, 0, 0, 0, 0];
    assert_eq!(call("clone", first(0x0120_0011)), ALLOW);
    for flag in [
        0x0002_0000u64,
        0x0200_0000,
        0x1000_0000,
        0x2000_0000,
        0x4000_0000,
        0x0400_0000,
        0x0800_0000,
        0x80,
    ] {
        assert_eq!(call("clone", first(flag | 17)), ERRNO | 1);
        assert_eq!(call("unshare", first(flag)), ERRNO | 1);
    }
    for family in 0..50 {
        let wanted = if [1, 2, 10, 16].contains(&family) {
            ALLOW
        } else {
            ERRNO | 97
        };
        assert_eq!(call("socket", first(family)), wanted);
    }
    for good in [
        0x5401,
        0x5413,
        0x541b,
        0x4004_9409,
        0x4020_940d,
        0xc018_9436,
        0x8008_6601,
        0x4008_6602,
        0x8004_5430,
    ] {
        assert_eq!(call("ioctl", second(good)), ALLOW, "{good:x}");
    }
    // TIOCSTI, TIOCLINUX, XFS_IOC_SWAPEXT, XFS_IOC_GOINGDOWN, FIFREEZE, BTRFS_IOC_SUBVOL_CREATE, SNAP_CREATE_V2, QUOTA_CTL,
    // EXT4_IOC_MOVE_EXT; the kernel ignores the upper half of the argument, and so must we.
    let bad = [
        0x5412,
        0x541c,
        0xc0c0_586d,
        0x8004_587d,
        0xc004_5877,
        0x5000_940e,
        0x5000_9417,
        0xc010_9428,
        0xc028_660f,
    ];
    for bad in bad {
        assert_eq!(call("ioctl", second(bad)), ERRNO | 1, "{bad:x}");
        assert_eq!(call("ioctl", second(bad | 1 << 40)), ERRNO | 1, "{bad:x}");
    }
    assert_eq!(call("personality", first(0x40000)), ALLOW);
    assert_eq!(call("personality", first(0x400_0000)), ERRNO | 1);
}

#[test]
fn a_value_may_leave_it_to_another_argument() {
    for (kind, wanted) in [
        (0, ALLOW),
        (4, ALLOW),
        (15, ALLOW),
        (9, ERRNO | 97),
        (12, ERRNO | 97),
        (16, ERRNO | 97),
    ] {
        assert_eq!(call("socket", [16, 3, kind, 0, 0, 0]), wanted);
        assert_eq!(call("socket", [2, 3, kind, 0, 0, 0]), ALLOW);
    }
}

#[test]
fn what_the_design_forbids_is_out() {
    for name in [
        "bpf",
        "mount",
        "ptrace",
        "io_uring_setup",
        "keyctl",
        "perf_event_open",
        "userfaultfd",
        "clone3",
        "setns",
    ] {
        assert_eq!(call(name, [0; 6]) == ALLOW, name == "ptrace", "{name}");
    }
    assert_eq!(call("clone3", [0; 6]), ERRNO | 38);
}

#[test]
fn a_faulty_list_is_refused_by_name() {
    let head = "architecture = \"x86_64\"\ndefault = \"EPERM\"\nunknown = \"ENOSYS\"\n";
    let compile_with = |rest: &str| compile(&format!("{head}{rest}")).unwrap_err();
    assert_eq!(
        compile_with("[[allow]]\nreason = \"r\"\ncalls = [\"nope\"]"),
        Error::UnknownCall("nope".into())
    );
    assert_eq!(
        compile_with("[[allow]]\nreason = \" \"\ncalls = [\"read\"]"),
        Error::NoReason("read".into())
    );
    assert_eq!(
        compile_with("[[allow]]\nreason = \"r\"\ncalls = [\"read\", \"read\"]"),
        Error::Twice("read".into())
    );
    assert!(matches!(
        compile_with("[[allow]]\ncalls = [\"read\"]"),
        Error::Syntax(_)
    ));
    assert!(matches!(
        compile("architecture = \"arm\"\ndefault = \"EPERM\"\nunknown = \"EPERM\""),
        Err(Error::Architecture(_))
    ));
}

#[test]
fn the_program_fits() {
    let program = Program::new(&List::parse(TEXT).unwrap()).unwrap();
    assert!(program.bytes().len() / 8 < 600, "{}", program.bytes().len() / 8);
}
