"""One end of a relayed connection: a socket as it is, or TLS over it that ends here (only where the operator gave a credential)."""

import asyncio
import socket
import ssl
import struct
from contextlib import suppress

from dsec.gate.pump import shut
from dsec.gate.refusal import Refused

__all__ = ["TlsWire", "Wire", "connect"]

_STEP = 64 * 1024
_RESET = struct.pack("ii", 1, 0)


class Wire:
    """A connected, non-blocking socket. `ahead`: what has been read of it already and is to be read again."""

    def __init__(self, sock: socket.socket, ahead: bytes = b"") -> None:
        self.sock = sock
        self._ahead = ahead

    async def receive(self) -> bytes:
        """Some bytes; none at the end."""
        if self._ahead:
            ahead, self._ahead = self._ahead, b""
            return ahead
        return await asyncio.get_running_loop().sock_recv(self.sock, _STEP)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def end(self) -> None:
        """Tells the peer that no more comes."""
        shut(self.sock)

    def reset(self) -> None:
        """Lets the peer see a reset when the socket is closed."""
        with suppress(OSError):  # it has gone already
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


class TlsWire(Wire):
    """TLS over a Wire. `handshake` comes first."""

    def __init__(self, wire: Wire, context: ssl.SSLContext, *, server_side: bool, name: str) -> None:
        super().__init__(wire.sock)
        self._wire = wire
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._in, self._out, server_side=server_side, server_hostname=None if server_side else name
        )
        self._sending = asyncio.Lock()

    async def handshake(self) -> None:
        """Raises Refused(`tls`) when the peer cannot be trusted or does not speak TLS."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                await self._flush()
                await self._more()
            except ssl.SSLError as error:
                with suppress(OSError):  # the alert, if the peer still listens
                    await self._flush()
                raise Refused("tls", f"no TLS with the peer: {error.reason}") from error
            else:
                await self._flush()
                return

    async def receive(self) -> bytes:
        while True:
            try:
                return self._tls.read(_STEP)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._more()
            except ssl.SSLZeroReturnError:
                return b""
            except ssl.SSLError as error:
                raise ConnectionResetError(f"TLS broke: {error.reason}") from error

    async def send(self, data: bytes) -> None:
        self._tls.write(data)  # to memory; bounded by the pieces that callers send
        await self._flush()

    async def end(self) -> None:
        with suppress(ssl.SSLError):  # its alert goes out; the peer's is not waited for
            self._tls.unwrap()
        await self._flush()
        await super().end()

    async def _flush(self) -> None:
        async with self._sending:
            if data := self._out.read():
                await self._wire.send(data)

    async def _more(self) -> None:
        if data := await self._wire.receive():
            self._in.write(data)
        else:
            self._in.write_eof()
            if self._in.eof:
                raise ConnectionResetError("the peer ended within TLS")


async def connect(addresses: tuple[str, ...], port: int, seconds: float) -> socket.socket:
    """A connection to the first of the addresses that answers. Raises Refused(`unreachable`)."""
    loop, last = asyncio.get_running_loop(), ""
    try:
        async with asyncio.timeout(seconds):
            for number, address in enumerate(addresses):
                sock = socket.socket(
                    socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
                )
                try:
                    async with asyncio.timeout(max(1.0, seconds / (len(addresses) - number) / 2)):
                        await loop.sock_connect(sock, (address, port))
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                except (OSError, TimeoutError) as error:
                    sock.close()
                    last = str(error) or "no answer in time"
                except BaseException:
                    sock.close()
                    raise
                else:
                    return sock
    except TimeoutError:
        last = "no answer in time"
    raise Refused("unreachable", f"cannot be reached: {last}")
