"""What an aether, or whoever sits at its socket, may send to an edge: dsec.edge.agent."""

import asyncio
import socket
import struct
from collections.abc import Sequence
from typing import Any

from dsec.edge.agent import _Connection
from dsec.model import aether as wire
from dsec.model.errors import DSecError
from fuzz.draw import Draw


class Wire(asyncio.Transport):
    """The other end as the connection sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = self.aborted = False

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def abort(self) -> None:
        self.aborted = True


async def taken(parts: Sequence[bytes]) -> tuple[list[Any], str]:
    """The frames, and the code of the error that ends them."""
    pipe, found = Wire(), []
    with socket.socket(socket.AF_UNIX) as dialled:
        connection = _Connection(asyncio.get_running_loop(), dialled)
        connection.connection_made(pipe)
        for part in parts:
            connection.data_received(part)
            assert len(connection._buffer) <= wire.MAX_PAYLOAD + 5 + len(part)
        broken = pipe.aborted
        connection.connection_lost(None)
        while True:
            try:
                found.append(await connection.take())
            except DSecError as error:
                assert broken == (error.code == "runtime_failure")
                return found, error.code


def replies(data: bytes) -> None:
    """Any bytes in any cut: the same frames, then a typed error; what is decoded is a reply or output and fits its bound."""
    draw = Draw(data)
    cut = 1 + draw.number()
    if draw.once_in(2):
        body, stream = draw, b""
        while body and len(stream) < 1 << 16:
            payload = body.bytes(body.number())
            stream += struct.pack("<IB", len(payload) + 1, body.below(5)) + payload
    else:
        stream = draw.rest()
    whole = asyncio.run(taken([stream]))
    assert whole == asyncio.run(taken([stream[at : at + cut] for at in range(0, len(stream), cut)]))
    for frame in whole[0]:
        if isinstance(frame, tuple):
            assert frame[0] in (wire.FRAME_STDOUT, wire.FRAME_STDERR) and len(frame[1]) <= wire.MAX_PAYLOAD
        else:
            assert isinstance(frame, wire.Reply)
