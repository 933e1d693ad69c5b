"""An image from a registry by the command, with credentials from standard input, and with those of `docker login`."""

import asyncio
import base64
import json
import os
import sys
from pathlib import Path

from imagekit import file, image, tar
from registrypeer import Registry, serving


async def dsec(*words: str, stdin: bytes = b"", home: Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dsec", *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE, env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    out, err = await process.communicate(stdin)
    return process.returncode or 0, out.decode(), err.decode()


async def test_import(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    async with serving(Registry(auth="bearer", redirect=True)) as registry:
        registry.add("1", image([tar([file("etc/motd", b"hello")])], "+zstd"))
        name = f"{registry.host}/team/app:1"
        code, _, err = await dsec("image", "import", "--state", state, "x", name, home=tmp_path)
        assert code == 1 and "Unauthenticated" in err
        login = ("--username", "user", "--password-stdin")
        code, out, err = await dsec(
            "image", "import", "--state", state, "--json", *login, "x", name, stdin=b"secret\n", home=tmp_path
        )
        assert code == 0, err
        record = json.loads(out)
        assert record["origin"] == f"docker://{name}" and "secret" not in out + err
        (tmp_path / ".docker").mkdir()
        auth = base64.b64encode(b"user:secret").decode()
        (tmp_path / ".docker/config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
        code, out, err = await dsec(
            "image", "import", "--state", state, "--json", "y", f"docker://{name}", home=tmp_path
        )
        assert code == 0 and json.loads(out)["digest"] == record["digest"], err
    code, _, err = await dsec("image", "import", "--state", state, "z", name, home=tmp_path)
    assert code == 125 and "Unavailable" in err
