//! connect: bytes to and from a port of the sandbox's loopback. aether runs in the sandbox's network namespace.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use dsec_proto::{ClosedReply, DoneReply, Reply, FRAME_STDOUT};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::TcpStream;

use crate::channel::{Channel, Input, Reader, Writer};
use crate::connection::Stop;
use crate::failure::Failure;

const CHUNK: usize = 64 * 1024;

pub async fn connect(channel: &mut Channel, port: u32) -> Result<(), Stop> {
    let port = u16::try_from(port).ok().filter(|&port| port != 0);
    let port = port.ok_or_else(|| Failure::invalid("port", "a port is 1 to 65535"))?;
    let socket = match TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await {
        Ok(socket) => socket,
        Err(first) => {
            let second = TcpStream::connect(SocketAddr::from((Ipv6Addr::LOCALHOST, port))).await;
            second.map_err(|_| refused(port, &first))?
        }
    };
    let _ = socket.set_nodelay(true);
    channel.writer.reply(&Reply::Done(DoneReply {})).await?;
    let (mut from_port, mut to_port) = socket.into_split();
    // The port's end leaves the other direction open; the connection's end ends both.
    tokio::select! {
        result = async {
            download(&mut from_port, &mut channel.writer).await?;
            std::future::pending().await
        } => result,
        () = upload(&mut channel.reader, &mut to_port) => Ok(()),
    }
}

fn refused(port: u16, error: &io::Error) -> Failure {
    Failure::missing("port", format!("nothing answers on port {port}: {error}"))
}

async fn download(port: &mut OwnedReadHalf, writer: &mut Writer) -> Result<(), Stop> {
    let mut buffer = Vec::new();
    loop {
        port.readable().await?;
        buffer.resize(CHUNK, 0);
        match port.read(&mut buffer).await {
            Ok(0) | Err(_) => return Ok(writer.reply(&Reply::Closed(ClosedReply {})).await?),
            Ok(size) => writer.data(FRAME_STDOUT, &buffer[..size]).await?,
        }
    }
}

async fn upload(reader: &mut Reader, port: &mut OwnedWriteHalf) {
    loop {
        match reader.input().await {
            Input::Data(data) => {
                // A port that takes no more still may have something to say; the rest is dropped.
                let _ = port.write_all(&data).await;
            }
            Input::End => {
                let _ = port.shutdown().await;
            }
            Input::Closed => return,
        }
    }
}
