"""dsec net and dsec run --network against the fake server, and the words of rules."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click
import pytest

from apifake import Server, serving
from dsec.cli.netrules import network_rules
from dsec.model.network import NetworkRule
from unit.cli.test_commands import DSEC, cli, environment


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    (tmp_path / "root").mkdir()
    async with serving(tmp_path / "root") as made:
        yield made


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        ((), None),
        (("none",), None),
        (("off",), {}),
        (("pypi", "npm"), {"pypi": True, "npm": True}),
        (("pypi:before=2024-05-01",), {"pypi": NetworkRule(before="2024-05-01")}),
        (("goproxy:modules=a.test/x,b.test",), {"goproxy": NetworkRule(modules=("a.test/x", "b.test"))}),
        (("a.test",), {"rule-0": NetworkRule(hosts=("a.test",))}),
        (("off", "*.a.test:8000-8100/tcp"), {"rule-1": NetworkRule(hosts=("*.a.test",), ports=("8000-8100",), protocols=("tcp",))}),
        (("203.0.113.0/24",), {"rule-0": NetworkRule(cidrs=("203.0.113.0/24",))}),
        (("203.0.113.0/24:53/udp",), {"rule-0": NetworkRule(cidrs=("203.0.113.0/24",), ports=("53",), protocols=("udp",))}),
        (("2001:db8::/32",), {"rule-0": NetworkRule(cidrs=("2001:db8::/32",))}),
        (("[2001:db8::7]:443",), {"rule-0": NetworkRule(cidrs=("2001:db8::7/128",), ports=("443",))}),
        (("192.0.2.7:22",), {"rule-0": NetworkRule(cidrs=("192.0.2.7/32",), ports=("22",))}),
    ],
)  # fmt: skip
def test_words_of_rules(words: tuple[str, ...], rules: Any) -> None:
    assert network_rules(words) == rules


@pytest.mark.parametrize("words", [("pypi", "pypi"), ("pypi:after=2024-05-01",), ("pypi:x",)])
def test_words_that_mean_nothing(words: tuple[str, ...]) -> None:
    with pytest.raises(click.BadParameter):
        network_rules(words)


async def test_rules_from_run_to_set_and_log(server: Server) -> None:
    code, out, err = await cli(
        server, "run", "--image", "python-3.11", "--network", "pypi", "--network-group", "g", "--alias", "db"
    )
    assert code == 0, err
    box = out.decode().strip()
    spec = server.sandboxes[box].spec
    assert (spec.network_rules, spec.network_group, spec.aliases) == ({"pypi": True}, "g", ("db",))
    code, out, err = await cli(server, "net", "set", "--json", box, "203.0.113.0/24:80")
    assert code == 0, err
    assert json.loads(out)["rules"] == {"rule-0": {"cidrs": ["203.0.113.0/24"], "ports": ["80"]}}
    code, out, _ = await cli(server, "net", "show", box)
    assert code == 0 and b"allowed 203.0.113.0/24 tcp 0-65535 direct" in out
    code, out, _ = await cli(server, "net", "set", "--json", box, "--file", "-", stdin=b'{"x": {"hosts": ["a.test"]}}')
    assert json.loads(out)["rules"] == {"x": {"hosts": ["a.test"]}}
    code, out, _ = await cli(server, "net", "log", box)
    assert b"\x1b" not in out, "a program's name moves no terminal"
    assert out.startswith(b"00:00:01.500 refused  tcp  192.0.2.1:22 [no rule] said by tenant: pid=7 comm=a?[2J")
    assert (await cli(server, "net", "log", "--allowed", box))[1] == b""
    for wrong in (("set", box), ("set", box, "off", "--phase", "a"), ("set", box, "none")):
        assert (await cli(server, "net", *wrong))[0] == 2
    assert (await cli(server, "net", "set", box, "--file", "-", stdin=b"{"))[0] == 2


async def test_port_forward_listens_on_this_machine_alone(server: Server) -> None:
    _, out, _ = await cli(server, "run", "--image", "python-3.11")
    box = out.decode().strip()
    process = await asyncio.create_subprocess_exec(
        *DSEC,
        "port-forward",
        box,
        "0:2222",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(server),
    )
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        port = int(line.split()[0].rpartition(":")[2])
        assert line == f"127.0.0.1:{port} -> {box}:2222\n"
        for _ in range(2):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"to port 2222\n" + b"x" * 300_000)
            writer.write_eof()
            assert await reader.readline() == b"to port 2222\n", "the fake tells it back"
            writer.close()
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 128 + 15
    for wrong in ("0", "a", "70000", "1:2:3"):
        assert (await cli(server, "port-forward", box, wrong))[0] == 2
