//! One shell session as a state machine without I/O: what to write to the shell, and how the end of a command is known.
//!
//! The shell reads its script from descriptor 0, and every command runs as `command eval 'TEXT' </dev/null`, so neither the
//! script nor the status descriptor is open in what it starts. After each command the shell writes `NONCE STATUS` to the
//! status descriptor; the nonce is new for every command, so that nothing a command prints or writes can stand for it.
#![forbid(unsafe_code)]

use std::fmt::Write as _;

/// Longest line that is kept of the status descriptor; longer ones are dropped as noise.
const LONGEST_LINE: usize = 256;

/// Which family of shells a program belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shell {
    Bash,
    Posix,
}

impl Shell {
    /// By the last part of its path: bash is asked things that other shells do not know.
    pub fn of(path: &str) -> Self {
        match path.rsplit('/').next() {
            Some("bash") => Self::Bash,
            _ => Self::Posix,
        }
    }

    /// Arguments of the shell, its name first. `-i`: a failing expansion or an interrupt ends the command, not the shell.
    pub fn argv(self, path: &str) -> Vec<String> {
        let options: &[&str] = match self {
            Self::Bash => &["--norc", "--noprofile", "--noediting", "-i", "+m", "-s"],
            Self::Posix => &["-i", "+m", "-s"],
        };
        std::iter::once(path)
            .chain(options.iter().copied())
            .map(str::to_owned)
            .collect()
    }

    /// Descriptor of status lines in the shell. dash reads only single digits; bash's is out of the way of scripts.
    pub fn status_descriptor(self, open_files: u64) -> u32 {
        match self {
            Self::Bash if open_files > 256 => 252,
            _ => 8,
        }
    }

    /// Signal that makes the shell drop the command it is in. bash ignores SIGINT while it waits for a child that did not
    /// die of it, but a trap runs as soon as the child is gone.
    pub fn interrupt_signal(self) -> i32 {
        match self {
            Self::Bash => 64,
            Self::Posix => 2,
        }
    }
}

/// What became known from the status descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The shell has read the whole command and begins with it; before that an interrupt would tear its script.
    Begun,
    /// The shell has started, or is back after an interrupt; what it printed until now is its own.
    Ready,
    /// The command ended with this status.
    Finished(i32),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the session is busy")]
    Busy,
    #[error("the session has ended")]
    Ended,
    #[error("a command may not hold a NUL")]
    Nul,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    Starting(String),
    Idle,
    Sent(String),
    Running(String),
    Interrupted(String),
    Ended,
}

/// One session. Nonces are given by the caller: unguessable text of `[0-9a-z]`, a new one each time.
#[derive(Debug)]
pub struct Chronus {
    shell: Shell,
    status_descriptor: u32,
    state: State,
    last_status: i32,
    line: Vec<u8>,
    overlong: bool,
}

impl Chronus {
    /// A session of `shell`, and what to write to its descriptor 0 first; `Event::Ready` follows.
    pub fn start(shell: Shell, status_descriptor: u32, nonce: &str) -> (Self, Vec<u8>) {
        let setup = match shell {
            // History, prompts and their hooks off; $0 as a user expects it.
            Shell::Bash => {
                "PS1= PS2= PROMPT_COMMAND=; unset PROMPT_COMMAND; set +o history +H; trap 'kill -INT $$' RTMAX; "
            }
            Shell::Posix => "PS1= PS2=; ",
        };
        let script = format!("{setup}{}", report(status_descriptor, nonce));
        let state = State::Starting(nonce.to_owned());
        let session = Self {
            shell,
            status_descriptor,
            state,
            last_status: 0,
            line: Vec::new(),
            overlong: false,
        };
        (session, script.into_bytes())
    }

    pub fn shell(&self) -> Shell {
        self.shell
    }

    pub fn is_busy(&self) -> bool {
        !matches!(self.state, State::Idle | State::Ended)
    }

    pub fn has_ended(&self) -> bool {
        self.state == State::Ended
    }

    /// What to write to the shell for one command; `Event::Finished` follows, unless the shell ends.
    pub fn run(&mut self, command: &str, nonce: &str) -> Result<Vec<u8>, Refused> {
        match self.state {
            State::Idle => {}
            State::Ended => return Err(Refused::Ended),
            _ => return Err(Refused::Busy),
        }
        if command.contains('\0') {
            return Err(Refused::Nul);
        }
        let mut script = String::with_capacity(command.len() + 256);
        // One compound command, so that the shell reads all of it before it reports that it begins.
        let _ = write!(
            script,
            "{{ command printf '{nonce} begun\\n' >&{}; ",
            self.status_descriptor
        );
        if self.last_status != 0 {
            // Our own report set $? to 0; the next command sees the status of the one before it.
            let _ = write!(script, "(exit {}); ", self.last_status);
        }
        let quoted = quote(command);
        let _ = writeln!(
            script,
            "command eval {quoted} </dev/null {}>&-; }}",
            self.status_descriptor
        );
        script.push_str(&report(self.status_descriptor, nonce));
        self.state = State::Sent(nonce.to_owned());
        Ok(script.into_bytes())
    }

    /// Whether the shell is in a command that `interrupt` can make it drop.
    pub fn can_interrupt(&self) -> bool {
        matches!(self.state, State::Running(_))
    }

    /// Give the running command up: the caller sends `interrupt_signal` to the shell and writes this; `Event::Ready` follows
    /// once the shell is back. None when no command runs.
    pub fn interrupt(&mut self, nonce: &str) -> Option<Vec<u8>> {
        if !matches!(self.state, State::Running(_) | State::Interrupted(_)) {
            return None;
        }
        self.state = State::Interrupted(nonce.to_owned());
        Some(format!("\n{}", report(self.status_descriptor, nonce)).into_bytes())
    }

    /// Bytes of the status descriptor. Lines that carry no expected nonce are ignored.
    pub fn feed(&mut self, bytes: &[u8]) -> Option<Event> {
        let mut event = None;
        for &byte in bytes {
            if byte != b'\n' {
                if self.line.len() < LONGEST_LINE {
                    self.line.push(byte);
                } else {
                    self.overlong = true;
                }
                continue;
            }
            let line = std::mem::take(&mut self.line);
            if !std::mem::take(&mut self.overlong) {
                event = self.judge(&line).or(event);
            }
        }
        event
    }

    fn judge(&mut self, line: &[u8]) -> Option<Event> {
        let (nonce, status) = std::str::from_utf8(line).ok()?.split_once(' ')?;
        if status == "begun" {
            if !matches!(&self.state, State::Sent(expected) if expected == nonce) {
                return None;
            }
            self.state = State::Running(nonce.to_owned());
            return Some(Event::Begun);
        }
        let status: i32 = status.parse().ok()?;
        let event = match &self.state {
            State::Starting(expected) if expected == nonce => Event::Ready,
            State::Interrupted(expected) if expected == nonce => {
                self.last_status = 130;
                Event::Ready
            }
            State::Running(expected) if expected == nonce => {
                self.last_status = status & 0xff;
                Event::Finished(status)
            }
            _ => return None,
        };
        self.state = State::Idle;
        Some(event)
    }

    /// The shell is gone.
    pub fn end(&mut self) {
        self.state = State::Ended;
    }
}

fn report(descriptor: u32, nonce: &str) -> String {
    format!("command printf '%s\\n' \"{nonce} $?\" >&{descriptor}\n")
}

/// One word of shell text that stands for `text` exactly.
fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}
