//! One shell session against a shell that writes what it likes.

use dsec_chronus::{Chronus, Event, Refused, Shell};

use crate::draw::Draw;

/// Nonces that were given out and whether a line with one may still mean something: the caller's own view of the session.
struct Book {
    current: Option<String>,
    count: u32,
}

impl Book {
    fn fresh(&mut self) -> String {
        self.count += 1;
        let nonce = format!("n{}", self.count);
        self.current = Some(nonce.clone());
        nonce
    }
}

/// What the shell writes: noise, stale and current nonces, in pieces.
fn written(draw: &mut Draw<'_>, book: &Book) -> Vec<u8> {
    let status = draw.byte();
    let nonce = book.current.clone().unwrap_or_default();
    match draw.byte() % 6 {
        0 => draw.bytes(usize::from(status)).to_vec(),
        1 => format!("{nonce} begun\n").into_bytes(),
        2 => format!("{nonce} {status}\n").into_bytes(),
        3 => format!("n{} {status}\n", draw.byte()).into_bytes(),
        4 => [
            vec![b'x'; 300 + usize::from(status)],
            format!("{nonce} 1\n").into_bytes(),
        ]
        .concat(),
        _ => [nonce.as_bytes(), b" ", draw.bytes(4), b"\n"].concat(),
    }
}

/// Calls and lines in any order. An event comes only from a line that is exactly the current nonce and a status; a command
/// comes to the shell as one word; the machine is never stuck in a state that it does not name.
pub fn chronus(data: &[u8]) {
    let mut draw = Draw(data);
    let shell = if draw.byte() & 1 == 0 {
        Shell::Bash
    } else {
        Shell::Posix
    };
    let mut book = Book {
        current: None,
        count: 0,
    };
    let (mut session, script) = Chronus::start(shell, shell.status_descriptor(1024), &book.fresh());
    assert!(script.ends_with(b"\n"));
    while !draw.is_empty() {
        match draw.byte() % 8 {
            0 => run(&mut session, &mut draw, &mut book),
            1 => interrupt(&mut session, &mut book),
            2 if draw.byte() == 0 => session.end(),
            _ => feed(&mut session, &mut draw, &book),
        }
        assert!(!session.has_ended() || !session.is_busy());
        assert!(!session.can_interrupt() || session.is_busy());
    }
}

fn run(session: &mut Chronus, draw: &mut Draw<'_>, book: &mut Book) {
    let length = usize::from(draw.byte());
    let command = String::from_utf8_lossy(draw.bytes(length)).into_owned();
    let (busy, ended) = (session.is_busy(), session.has_ended());
    let nonce = format!("n{}", book.count + 1);
    match session.run(&command, &nonce) {
        Ok(script) => {
            assert!(!busy && !ended && !command.contains('\0'));
            book.fresh();
            let script = String::from_utf8(script).expect("scripts are text");
            let from = script.find("command eval ").expect("one eval") + "command eval ".len();
            let (word, rest) = unquote(&script[from..]);
            assert_eq!(word, command);
            assert!(rest.starts_with(" </dev/null "));
        }
        Err(Refused::Busy) => assert!(busy),
        Err(Refused::Ended) => assert!(ended),
        Err(Refused::Nul) => assert!(command.contains('\0')),
    }
}

/// The word at the start of shell text made of single quotes and `\'` alone, and what follows it.
fn unquote(text: &str) -> (String, &str) {
    let (mut word, mut rest) = (String::new(), text);
    loop {
        if let Some(inner) = rest.strip_prefix('\'') {
            let end = inner.find('\'').expect("an open quote");
            word.push_str(&inner[..end]);
            rest = &inner[end + 1..];
        } else if let Some(after) = rest.strip_prefix("\\'") {
            word.push('\'');
            rest = after;
        } else {
            return (word, rest);
        }
    }
}

fn interrupt(session: &mut Chronus, book: &mut Book) {
    let nonce = format!("n{}", book.count + 1);
    if session.interrupt(&nonce).is_some() {
        book.fresh();
        assert!(session.is_busy() && !session.can_interrupt());
    }
}

fn feed(session: &mut Chronus, draw: &mut Draw<'_>, book: &Book) {
    let line = written(draw, book);
    let (could, busy) = (session.can_interrupt(), session.is_busy());
    let cut = draw.below(line.len() + 1);
    let (first, second) = line.split_at(cut);
    let events = [session.feed(first), session.feed(second)];
    let current = book.current.clone().unwrap_or_default();
    for event in events.into_iter().flatten() {
        assert!(busy);
        let text = String::from_utf8_lossy(&line).into_owned();
        assert!(text.contains(current.as_str()), "{event:?} out of {text:?}");
        match event {
            Event::Begun => assert!(session.can_interrupt() || !session.is_busy()),
            Event::Ready => assert!(!could),
            Event::Finished(_) => assert!(!session.is_busy()),
        }
    }
}
