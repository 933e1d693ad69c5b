"""A socket whose client is gone says so by one name, whichever way the server tells it."""

from typing import Any

import pytest

from dsec.web import Socket, SocketGone


@pytest.mark.parametrize("error", [ConnectionResetError(), RuntimeError("Unexpected ASGI message 'websocket.send'")])
async def test_a_send_to_a_socket_that_the_server_closed(error: Exception) -> None:
    async def send(message: Any) -> None:
        if message["type"] != "websocket.accept":
            raise error

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    socket = Socket(receive, send)
    await socket.accept()
    with pytest.raises(SocketGone):
        await socket.send_bytes(b"x")
    await socket.close()  # closed already
