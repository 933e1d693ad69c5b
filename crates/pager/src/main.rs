//! `dsec-pager`: serves layers' data on demand. A keeper process holds what a dead worker had open and becomes the next worker.
#![forbid(unsafe_code)]

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Duration;

use dsec_pager::{control, questions, Asker, Cell, Desk, Engine, Shared};
use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::process::{getrlimit, kill_process, setrlimit, waitpid, Pid, Resource, Signal, WaitOptions};

const USAGE: &str = "usage: dsec-pager --socket PATH --state DIRECTORY [--ready DESCRIPTOR]";
const FUSE: &str = "pager-fuse";
const LONGEST_DELAY_MS: u64 = 2000;

static SOCKET: OnceLock<PathBuf> = OnceLock::new();

struct Options {
    socket: PathBuf,
    state: PathBuf,
    /// Gets one byte and is closed once the socket listens.
    ready: Option<i32>,
    resume: Option<i32>,
}

fn options() -> Option<Options> {
    let mut words = std::env::args_os().skip(1);
    let (mut socket, mut state, mut ready, mut resume) = (None, None, None, None);
    while let Some(word) = words.next() {
        let value = words.next()?;
        match word.to_str()? {
            "--socket" => socket = Some(PathBuf::from(value)),
            "--state" => state = Some(PathBuf::from(value)),
            "--ready" => ready = Some(value.to_str()?.parse().ok()?),
            "--resume" => resume = Some(value.to_str()?.parse().ok()?),
            _ => return None,
        }
    }
    Some(Options {
        socket: socket?,
        state: state?,
        ready,
        resume,
    })
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run(&options) {
        Ok(never) => match never {},
        Err(error) => {
            eprintln!("dsec-pager: {error}");
            ExitCode::FAILURE
        }
    }
}

enum Never {}

fn run(options: &Options) -> io::Result<Never> {
    dsec_sys::ignore_signals(&[libc::SIGHUP, libc::SIGINT, libc::SIGTERM]);
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    setrlimit(Resource::Nofile, files)?;
    // Where the host does not allow it, the pager is as likely a victim as any other process.
    drop(fs::write("/proc/self/oom_score_adj", "-1000"));
    let shared = match options.resume {
        Some(number) => Shared::resume(number),
        None => prepare(options),
    };
    let shared = shared.map_err(io::Error::other)?;
    let delay = shared.cell(Cell::Delay);
    delay.store((delay.load(SeqCst) * 2).clamp(5, LONGEST_DELAY_MS), SeqCst);
    let desk = Arc::new(Desk::new(shared));
    if let Some(number) = options.ready {
        let ready = dsec_sys::adopt(number).map_err(io::Error::other)?;
        File::from(ready).write_all(b"!")?;
    }
    let exe = OwnedFd::from(File::open("/proc/self/exe")?);
    keep(&desk, &exe, options)?;
    for (cell, set) in [
        (Cell::Group, Desk::set_group as fn(&Desk, OwnedFd)),
        (Cell::Fuse, Desk::set_fuse),
    ] {
        if let Some(number) = desk.shared.descriptor(cell) {
            set(&desk, dsec_sys::adopt(number).map_err(io::Error::other)?);
        }
    }
    let listener = desk
        .shared
        .descriptor(Cell::Listener)
        .ok_or_else(|| io::Error::other("no listener"))?;
    let listener = UnixListener::from(dsec_sys::adopt(listener).map_err(io::Error::other)?);
    drop(SOCKET.set(options.socket.clone()));
    let engine = Arc::new(Engine::new(Arc::clone(&desk), options.state.join("run").join(FUSE)));
    if options.resume.is_some() {
        engine.resume();
        questions::resume(&engine);
    }
    let (kept, words) = (Arc::clone(&desk), keeper_words(options, &desk)?);
    thread::spawn(move || keep_kept(&kept, &exe, &words));
    if desk.group().is_some() {
        questions::serve(&engine, Asker::Fanotify);
    }
    if desk.fuse().is_some() {
        questions::serve(&engine, Asker::Fuse);
    }
    let looker = Arc::clone(&engine);
    thread::spawn(move || looker.look_after());
    control::serve(&engine, &listener, stop)
}

/// What the first worker makes: all of it outlives it.
fn prepare(options: &Options) -> dsec_sys::Result<Shared> {
    let at = |op: &'static str, path: &Path, e: io::Error| dsec_sys::Error::from_io(op, path, &e);
    let run = options.state.join("run");
    fs::create_dir_all(&run).map_err(|e| at("mkdir", &run, e))?;
    let path = run.join("pager.lock");
    let flags = OFlags::RDWR | OFlags::CREATE;
    let lock = rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR).map_err(|e| at("open", &path, e.into()))?;
    rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).map_err(|e| at("flock", &path, e.into()))?;
    // The lock is ours, so whatever is mounted here has nobody who serves it.
    while dsec_sys::umount(&run.join(FUSE).to_string_lossy(), true).is_ok() {}
    let shared = Shared::create()?;
    shared.set_descriptor(Cell::Lock, lock.into_raw_fd());
    match dsec_sys::fanotify_group() {
        Ok(group) => shared.set_descriptor(Cell::Group, group.into_raw_fd()),
        Err(error) => eprintln!("dsec-pager: {error}; only FUSE is left"),
    }
    let socket = &options.socket;
    // A socket file that is there is a dead pager's: the lock says so.
    drop(fs::remove_file(socket));
    rustix::process::umask(Mode::from_raw_mode(0o177));
    let listener = UnixListener::bind(socket).map_err(|e| at("bind", socket, e))?;
    rustix::process::umask(Mode::from_raw_mode(0o022));
    let number = rustix::io::dup(&listener).map_err(|e| at("dup", socket, e.into()))?;
    shared.set_descriptor(Cell::Listener, number.into_raw_fd());
    Ok(shared)
}

fn keeper_words(options: &Options, desk: &Desk) -> io::Result<Vec<CString>> {
    let number = desk.shared.number().to_string();
    let words: [&[u8]; 7] = [
        b"dsec-pager",
        b"--socket",
        options.socket.as_os_str().as_bytes(),
        b"--state",
        options.state.as_os_str().as_bytes(),
        b"--resume",
        number.as_bytes(),
    ];
    words
        .into_iter()
        .map(|word| CString::new(word).map_err(io::Error::other))
        .collect()
}

fn keep(desk: &Desk, exe: &OwnedFd, options: &Options) -> io::Result<()> {
    start_keeper(desk, exe, &keeper_words(options, desk)?).map_err(io::Error::other)
}

fn start_keeper(desk: &Desk, exe: &OwnedFd, words: &[CString]) -> dsec_sys::Result<()> {
    let pid = dsec_sys::keep(exe.as_fd(), words, desk.shared.cell(Cell::Delay))?;
    desk.shared.cell(Cell::Keeper).store(pid as u64, SeqCst);
    Ok(())
}

/// Waits for the keeper's death for ever, and makes the next one.
fn keep_kept(desk: &Desk, exe: &OwnedFd, words: &[CString]) {
    loop {
        let pid = Pid::from_raw(desk.shared.cell(Cell::Keeper).load(SeqCst) as i32);
        let dead = waitpid(pid, WaitOptions::empty());
        if desk.is_ending() {
            return;
        }
        eprintln!("dsec-pager: the keeper ended ({dead:?}); starting another");
        while let Err(error) = start_keeper(desk, exe, words) {
            eprintln!("dsec-pager: no keeper: {error}");
            thread::park_timeout(Duration::from_millis(100));
        }
    }
}

fn stop(engine: &Engine) -> ! {
    engine.desk.set_ending();
    engine.end();
    let keeper = Pid::from_raw(engine.desk.shared.cell(Cell::Keeper).load(SeqCst) as i32);
    if let Some(keeper) = keeper {
        if let Err(error) = kill_process(keeper, Signal::KILL) {
            eprintln!("dsec-pager: the keeper: {error}");
        }
    }
    if let Some(socket) = SOCKET.get() {
        drop(fs::remove_file(socket));
    }
    std::process::exit(0)
}
