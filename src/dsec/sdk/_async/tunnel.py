"""A TCP connection to a port of a sandbox."""

from types import TracebackType

import aiohttp

from dsec.model.errors import Unavailable
from dsec.sdk.wire import error_from_close

__all__ = ["Tunnel"]

_FRAME = 1 << 17


class Tunnel:
    """Bytes to and from a program that listens in the sandbox. Made by `Sandbox.tunnel`; one reader and one writer at a time.
    A context manager that closes the connection at its end."""

    def __init__(self, channel: aiohttp.ClientWebSocketResponse, port: int) -> None:
        self._channel = channel
        self._port = port

    async def read(self) -> bytes:
        """Some bytes, as they come; b"" once the program inside has closed the connection. Raises Unavailable where it broke."""
        message = await self._channel.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            data: bytes = message.data
            return data
        if self._channel.close_code in (1000, 1001) or message.type is aiohttp.WSMsgType.CLOSED:
            return b""
        raise error_from_close(self._channel.close_code, str(message.extra or ""), f"the tunnel to port {self._port}")

    async def write(self, data: bytes) -> None:
        """Sends all of `data`; waits while the program inside does not read. Raises Unavailable where the connection is closed."""
        try:
            for start in range(0, len(data), _FRAME):
                await self._channel.send_bytes(data[start : start + _FRAME])
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Unavailable(f"the tunnel to port {self._port}: {error}") from error

    async def close(self) -> None:
        """Closes the connection; may be called again."""
        await self._channel.close()

    async def __aenter__(self) -> "Tunnel":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
