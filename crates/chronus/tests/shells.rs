//! The state machine against the shells themselves: state is kept, the end of a command is exact, nothing can forge it.
#![allow(clippy::unwrap_used, clippy::incompatible_msrv)]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, ChildStdin, Command, Stdio};

use dsec_chronus::{Chronus, Event, Refused, Shell};

static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

struct Session {
    chronus: Chronus,
    child: Child,
    script: ChildStdin,
    status: File,
    output: File,
    turn: u32,
    stuck: bool,
    busybox: bool,
}

fn ready(status: &File) -> bool {
    let mut polled = [rustix::event::PollFd::new(status, rustix::event::PollFlags::IN)];
    let patience = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&patience)).unwrap() > 0
}

fn open(program: &str, arguments: &[&str]) -> Option<Session> {
    let shell = Shell::of(program);
    let descriptor = shell.status_descriptor(64);
    let (status, status_writer) = std::io::pipe().unwrap();
    let (output, output_writer) = std::io::pipe().unwrap();
    // `sh` puts the pipe in the place that the session expects, then becomes the shell under test.
    let mut words = vec![program.to_owned()];
    words.extend(arguments.iter().map(|&word| word.to_owned()));
    words.extend(shell.argv(program).into_iter().skip(1));
    let inherited = inheritable(&status_writer);
    let number = inherited.as_raw_fd();
    let close = "9>&- 10>&- 11>&- 12>&- 251>&-";
    let line = format!(
        "exec {descriptor}>&{number} {number}>&-; exec {} {close}",
        words.join(" ")
    );
    let mut child = Command::new("bash")
        .args(["-c", &line])
        .stdin(Stdio::piped())
        .stdout(output_writer.try_clone().unwrap())
        .stderr(output_writer)
        .spawn()
        .ok()?;
    drop(status_writer);
    drop(inherited);
    let script = child.stdin.take().unwrap();
    let (chronus, first) = Chronus::start(shell, descriptor, "start");
    let mut session = Session {
        chronus,
        child,
        script,
        status: File::from(OwnedFd::from(status)),
        output: File::from(OwnedFd::from(output)),
        turn: 0,
        stuck: false,
        busybox: program == "busybox",
    };
    session.script.write_all(&first).unwrap();
    assert_eq!(session.wait(), Some(Event::Ready));
    Some(session)
}

/// A copy without close-on-exec, for the child; above every number that a session's shell uses itself.
fn inheritable(descriptor: &std::io::PipeWriter) -> OwnedFd {
    let copy = rustix::io::fcntl_dupfd_cloexec(descriptor, 300).unwrap();
    rustix::io::fcntl_setfd(&copy, rustix::io::FdFlags::empty()).unwrap();
    copy
}

impl Session {
    /// The next event; None when the shell is gone, or says nothing for ten seconds (then it is killed, so that no test hangs).
    fn wait(&mut self) -> Option<Event> {
        let mut bytes = [0; 64];
        loop {
            if !ready(&self.status) {
                self.stuck = true;
                self.child.kill().unwrap();
            }
            let size = self.status.read(&mut bytes).unwrap();
            if size == 0 {
                return None;
            }
            match self.chronus.feed(&bytes[..size]) {
                None | Some(Event::Begun) => {}
                Some(event) => return Some(event),
            }
        }
    }

    fn run(&mut self, command: &str) -> Option<i32> {
        self.turn += 1;
        let script = self.chronus.run(command, &format!("n{}", self.turn)).unwrap();
        self.script.write_all(&script).unwrap();
        match self.wait() {
            Some(Event::Finished(status)) => Some(status),
            _ => None,
        }
    }
}

fn each_shell(test: impl Fn(&mut Session)) {
    // One test at a time: what one is about to pass on must not reach a process of another.
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (program, arguments) in [
        ("bash", &[][..]),
        ("dash", &[][..]),
        ("busybox", &["sh"][..]),
        ("bash", &["--posix"][..]),
    ] {
        if let Some(mut session) = open(program, arguments) {
            test(&mut session);
            drop(session.script);
            session.child.wait().unwrap();
        }
    }
}

#[test]
fn state_is_kept_and_status_is_exact() {
    each_shell(|session| {
        assert_eq!(session.run("cd /tmp; x='a b'; f() { return 42; }"), Some(0));
        assert_eq!(session.run("test \"$PWD$x\" = '/tmpa b'"), Some(0));
        assert_eq!(session.run("f"), Some(42));
        assert_eq!(session.run("test $? = 42"), Some(0));
        assert_eq!(
            session.run("cat <<X >/dev/null\nhere ' doc\nX\nsh -c 'exit 3'"),
            Some(3)
        );
        assert_eq!(session.run("sh -c 'kill -9 $$'"), Some(137));
        assert_eq!(session.run("sleep 0.05 & wait $!"), Some(0));
    });
}

#[test]
fn errors_do_not_end_the_session() {
    each_shell(|session| {
        for bad in [
            "echo (",
            "echo 'unfinished",
            "echo ${nope?err}",
            "set -u; : $unset_one; set +u",
            "readonly r=1; r=2",
            "if",
            "}",
        ] {
            assert_ne!(session.run(bad), Some(0), "{bad}");
        }
        assert_eq!(session.run("set +u; true"), Some(0));
        assert_eq!(session.run("break; exec 5</dev/null; true"), Some(0));
    });
}

#[test]
fn commands_inherit_neither_script_nor_status() {
    each_shell(|session| {
        let look = "sh -c 'for n in 8 9 10 11 12 252 255; do test ! -e /proc/$$/fd/$n || exit 1; done'";
        assert_eq!(session.run(look), Some(0));
        assert_eq!(session.run("sh -c 'test $(ls /proc/self/fd | wc -l) -le 4'"), Some(0));
        assert_eq!(session.run("cat; read line"), Some(1));
    });
}

#[test]
fn an_interrupt_drops_the_whole_command_and_keeps_the_shell() {
    each_shell(|session| {
        assert_eq!(session.run("kept=1"), Some(0));
        for command in [
            "sleep 30; echo MORE\necho MORE",
            "while :; do :; done; echo MORE",
            "(sleep 30); sleep 30; echo MORE",
        ] {
            let script = session.chronus.run(command, "long").unwrap();
            session.script.write_all(&script).unwrap();
            while !session.chronus.can_interrupt() {
                let mut bytes = [0; 64];
                let size = session.status.read(&mut bytes).unwrap();
                assert_ne!(size, 0, "{command}");
                session.chronus.feed(&bytes[..size]);
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
            let pid = session.child.id();
            let sync = session.chronus.interrupt("back").unwrap();
            session.script.write_all(&sync).unwrap();
            let signal = session.chronus.shell().interrupt_signal();
            assert!(Command::new("kill")
                .arg(format!("-{signal}"))
                .arg(pid.to_string())
                .status()
                .unwrap()
                .success());
            Command::new("pkill")
                .args(["-9", "-P", &pid.to_string()])
                .status()
                .unwrap();
            let event = session.wait();
            // busybox may jump out of its handler while it holds a lock of its C library, and then waits for itself for ever;
            // aether ends such a session (`session_ended`).
            if event.is_none() && session.stuck && session.busybox {
                return;
            }
            assert_eq!(event, Some(Event::Ready), "{command}");
        }
        assert_eq!(session.run("test $kept = 1 && printf END"), Some(0));
        let mut seen = Vec::new();
        let mut part = [0; 4096];
        while !seen.ends_with(b"END") {
            let size = session.output.read(&mut part).unwrap();
            assert_ne!(size, 0);
            seen.extend_from_slice(&part[..size]);
        }
        assert!(!String::from_utf8_lossy(&seen).contains("MORE"));
    });
}

#[test]
fn exit_ends_it() {
    each_shell(|session| {
        assert_eq!(session.run("exit 7"), None);
        session.chronus.end();
        assert_eq!(session.chronus.run("true", "n"), Err(Refused::Ended));
        assert_eq!(session.child.wait().unwrap().code(), Some(7));
    });
}

#[test]
fn forged_status_lines_are_ignored() {
    let (mut chronus, _) = Chronus::start(Shell::Posix, 8, "a1");
    assert_eq!(chronus.feed(b"x 0\n \na1\na1 x\n"), None);
    assert_eq!(chronus.run("true", "b1"), Err(Refused::Busy));
    assert_eq!(chronus.feed(b"a1"), None);
    assert_eq!(chronus.feed(b" 0\n"), Some(Event::Ready));
    assert_eq!(chronus.run("a\0b", "b1"), Err(Refused::Nul));
    assert!(chronus.run("true", "b1").is_ok());
    let mut long = vec![b'z'; 1 << 20];
    long.extend_from_slice(b"b1 0\n");
    assert_eq!(chronus.feed(&long), None);
    assert_eq!(chronus.feed(b"a1 begun\nb1 5\n"), None);
    assert_eq!(chronus.feed(b"b1 begun\n"), Some(Event::Begun));
    assert_eq!(chronus.feed(b"b1 begun\na1 0\nb1 5\n"), Some(Event::Finished(5)));
    assert!(!chronus.is_busy());
}
