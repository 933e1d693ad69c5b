//! The socket that the server talks to.

use std::io::BufReader;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use serde_json::{json, Value};

use crate::engine::Engine;
use crate::shared::Cell;
use dsec_pages::wire::{decode, read_frame, write_answer, Mechanism, Op, Refusal, VERSION};

/// Connections at once; another one is closed unheard.
const CONNECTIONS: usize = 64;
const LONGEST_QUIET: f64 = 24.0 * 3600.0;

/// Takes connections for ever.
pub fn serve(engine: &Arc<Engine>, listener: &UnixListener, stop: fn(&Engine) -> !) -> ! {
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                eprintln!("dsec-pager: accept: {error}");
                thread::park_timeout(Duration::from_millis(50));
                continue;
            }
        };
        if open.fetch_add(1, SeqCst) >= CONNECTIONS {
            open.fetch_sub(1, SeqCst);
            continue;
        }
        let (engine, count) = (Arc::clone(engine), Arc::clone(&open));
        let spawned = thread::Builder::new().name("control".to_owned()).spawn(move || {
            if let Err(error) = converse(&engine, stream, stop) {
                eprintln!("dsec-pager: a connection broke: {error}");
            }
            count.fetch_sub(1, SeqCst);
        });
        if spawned.is_err() {
            open.fetch_sub(1, SeqCst);
        }
    }
}

fn converse(engine: &Arc<Engine>, stream: UnixStream, stop: fn(&Engine) -> !) -> std::io::Result<()> {
    let mut from = BufReader::new(stream.try_clone()?);
    let mut to = stream;
    while let Some(frame) = read_frame(&mut from)? {
        match decode(&frame) {
            // A frame that is none has no number to answer to.
            Err(refusal) => write_answer(&mut to, 0, &Err(refusal))?,
            Ok(request) => {
                let stops = matches!(request.op, Op::Stop { .. });
                let answer = answer(engine, request.op);
                write_answer(&mut to, request.id, &answer)?;
                if stops && answer.is_ok() {
                    stop(engine);
                }
            }
        }
    }
    Ok(())
}

fn answer(engine: &Arc<Engine>, op: Op) -> Result<Value, Refusal> {
    match op {
        Op::Hello { version } if version != VERSION => Err(Refusal::new(
            "unsupported",
            format!("this pager speaks version {VERSION}"),
        )),
        Op::Hello { .. } => Ok(hello(engine)),
        Op::Attach(attach) => engine.attach(&attach),
        Op::Detach { layer } => engine.detach(&layer),
        Op::Stats { layer } => engine.stats(layer.as_deref()),
        Op::Prefetch { layer, chunks, depth } => engine.prefetch(&layer, &chunks, depth),
        Op::Fill { layer } => engine.prefetch(&layer, &[(0, u32::MAX)], usize::MAX),
        Op::Trace { layer, on } => engine.trace(&layer, on),
        Op::Evict {
            layer,
            ranges,
            mounted,
            quiet_seconds,
        } => {
            let quiet = if quiet_seconds.is_finite() {
                quiet_seconds.clamp(0.0, LONGEST_QUIET)
            } else {
                LONGEST_QUIET
            };
            engine.evict(&layer, &ranges, mounted, Duration::from_secs_f64(quiet))
        }
        Op::Store { layer, store } => engine.restore_named(&layer, &store),
        Op::Stop { force } if force || engine.may_stop() => Ok(json!({})),
        Op::Stop { .. } => Err(Refusal::new("busy", "layers are attached that are not whole")),
    }
}

fn hello(engine: &Engine) -> Value {
    let mut mechanisms = vec![Mechanism::Fuse];
    if engine.desk.group().is_some() {
        mechanisms.insert(0, Mechanism::Fanotify);
    }
    let shared = &engine.desk.shared;
    json!({
        "version": VERSION,
        "pid": std::process::id(),
        "keeper": shared.cell(Cell::Keeper).load(SeqCst),
        "restarts": shared.cell(Cell::Restarts).load(SeqCst),
        "mechanisms": mechanisms,
    })
}
