"""Images of a local Docker, through its API: what `docker save` would write, read from the daemon's Unix socket."""

from pathlib import Path
from urllib.parse import quote

import aiohttp

from dsec.images.oci import Workshop
from dsec.model.errors import InvalidArgument, NotFound, RuntimeFailure, Unavailable

__all__ = ["SOCKET", "save_image"]

SOCKET = Path("/var/run/docker.sock")
_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=20, sock_read=300)


async def save_image(name: str, socket: Path, work: Workshop) -> Path:
    """Writes the daemon's image `name` as an archive into `work.folder`, and gives its path.

    Raises NotFound (no such image), Unavailable (no daemon at `socket`), InvalidArgument (beyond the bounds).
    """
    path, total = work.folder / "docker.tar", 0
    try:
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket)), timeout=_TIMEOUT) as session,
            session.get(f"http://docker/images/{quote(name, safe='')}/get") as answer,
        ):
            if answer.status == 404:
                raise NotFound(f"the local Docker has no image {name!a}", what="image")
            if answer.status != 200:
                raise RuntimeFailure(f"the local Docker answered {answer.status} for {name!a}")
            work.progress.step("save", None)
            with path.open("xb") as out:
                async for data in answer.content.iter_chunked(1 << 20):
                    total += len(data)
                    if total > work.config.archive_bytes:
                        raise InvalidArgument(
                            f"an image of more than {work.config.archive_bytes} bytes", field="source"
                        )
                    out.write(data)
                    work.progress.add(len(data))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"no Docker daemon answers at {socket}: {error or 'no answer in time'}") from error
    return path
