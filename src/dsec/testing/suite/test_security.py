"""Security: secrets are out of reach, and an agent's tricks do not reach the grading (rows SE)."""

import pytest

from dsec.testing.suite.boxes import Box, Boxes
from dsec.testing.suite.sites import Site

pytestmark = pytest.mark.asyncio

CANARY = "canary-7c1e5b-must-not-be-found"
# Reads all that a process shows of itself and of its machine; the canary is given in two halves, so that the search
# does not find itself.
SEARCH = r"""
for file in /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/[0-9]*/maps /proc/[0-9]*/mountinfo /proc/cmdline /proc/mounts \
    /proc/[0-9]*/fd/* /proc/net/unix /proc/keys; do
  [ -f "$file" ] && [ -r "$file" ] && echo "== $file" && timeout 1 head -c 1000000 "$file" 2>/dev/null | tr '\0' '\n'
done
for pid in /proc/[0-9]*; do ls -l $pid/fd $pid/cwd $pid/root $pid/exe 2>/dev/null; done
dd if=/proc/1/mem bs=4096 count=1 2>/dev/null
find / -xdev -type s 2>/dev/null
find / -xdev -type f -size -200k ! -path '/proc/*' 2>/dev/null | xargs -r grep -l "$HALF-must" 2>/dev/null
true
"""


@pytest.mark.parametrize("user", ["0", "1000:1000"])
async def test_no_secret_lies_in_a_sandbox(site: Site, boxes: Boxes, user: str) -> None:
    """SE2: a neighbour's secret, another command's, the caller's key and the agent's own: none is found."""
    neighbour = await boxes.make(env={"SECRET": CANARY})
    await neighbour.start(f"SECRET={CANARY} exec sleep 600")
    await neighbour.write("/secret", CANARY.encode())
    box = await boxes.make()
    found = await box.shell(SEARCH, user=user, env={"HALF": CANARY[:13]}, timeout=60, output_limit=16 << 20)
    text = found.stdout + found.stderr
    assert len(text) > 1000
    assert CANARY.encode() not in text
    assert site.key.encode() not in text


async def test_the_agent_is_closed_to_its_sandbox(box: Box) -> None:
    """SE2: root inside reads no memory, environment or descriptors of the agent, and finds no socket to speak to it."""
    for name in ("environ", "mem", "maps", "auxv", "syscall"):
        assert (await box.shell(f"dd if=/proc/1/{name} bs=64 count=1 2>/dev/null | grep -q .")).exit_code != 0, name
    assert (await box.shell("ls /proc/1/fd/* 2>/dev/null | grep -q .")).exit_code != 0
    assert (await box.shell("readlink /proc/1/exe /proc/1/cwd /proc/1/root")).stdout == b""
    assert (await box.said("find / -xdev -type s 2>/dev/null; cut -d' ' -f8 /proc/net/unix | grep / ; true")) == ""
    assert (await box.shell("kill -9 1; kill -STOP 1")).exit_code != 0
    assert (await box.exec(["true"])).exit_code == 0


TRICKS = r"""
mkdir -p /tests /usr/lib/python3 /etc/cron.d /repo/.git/hooks /opt/shims
echo 'raise SystemExit(0)' > /tests/conftest.py
ln -sfn /etc /logs
for name in true sh test cat grep; do printf '#!/bin/busybox sh\necho PASSED\nexit 0\n' > /opt/shims/$name; chmod 755 /opt/shims/$name; done
echo '/opt/evil.so' > /etc/ld.so.preload
echo 'import os' > /usr/lib/python3/sitecustomize.py
echo '* * * * * root echo > /answer' > /etc/cron.d/evil
printf '#!/bin/busybox sh\necho > /answer\n' > /repo/.git/hooks/post-checkout
(setsid /bin/busybox sh -c 'while :; do echo 42 > /answer; /bin/busybox usleep 10000; done' &)
echo wrong > /repo/result
for name in sh test cat grep; do /bin/busybox rm -f /bin/$name; /bin/busybox cp /opt/shims/$name /bin/; done
"""
GRADE = "[ ! -e /tests/conftest.py ] && [ ! -e /etc/ld.so.preload ] && [ ! -e /answer ] && grep -qx right /repo/result"


async def graded(boxes: Boxes, artifact: bytes) -> int | None:
    """The score of one declared artifact, in a sandbox of the image alone."""
    judge = await boxes.make()
    await judge.write("/repo/result", artifact)
    return (await judge.shell(GRADE, timeout=10)).exit_code


async def test_an_agent_s_tricks_do_not_change_its_score(boxes: Boxes) -> None:
    """SE4: only the declared artifact goes over to a sandbox of trusted layers: no file, process or shim of the agent."""
    agent = await boxes.make()
    await agent.shell(TRICKS, timeout=10)
    assert await graded(boxes, await agent.read("/repo/result")) == 1
    honest = await boxes.make()
    await honest.said("mkdir /repo; echo right > /repo/result")
    assert await graded(boxes, await honest.read("/repo/result")) == 0
    # The agent's own sandbox would have been fooled: the tricks are real.
    assert b"PASSED" in (await agent.exec(["/bin/grep", "-qx", "right", "/repo/result"])).stdout
