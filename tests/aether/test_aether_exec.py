"""Commands through aether: exact ends, whole trees, bounded output, what a command sees of itself."""

import asyncio
import time

import pytest

from aether.box import ENV, Box, collect, request
from dsec.model import aether as wire

pytestmark = pytest.mark.root


async def test_statuses_are_exact(box: Box) -> None:
    for code in (0, 1, 42, 255):
        assert (await box.sh(f"exit {code}")).code == code
    for signal in (9, 11, 15):
        ran = await box.sh(f"kill -{signal} $$")
        assert (ran.ended.outcome, ran.ended.signal, ran.code) == ("signalled", signal, None)


async def test_what_cannot_start_is_named(box: Box) -> None:
    await box.sh("echo '#!/nowhere/x' > /tmp/lost; chmod 755 /tmp/lost; echo text > /tmp/plain; echo text > /tmp/exe;"
                 "chmod 755 /tmp/exe; mkdir /tmp/closed; chmod 700 /tmp/closed")  # fmt: skip
    for argv, more, wanted in [
        (["nope"], {}, ("command_not_found", "command")),
        (["/bin/nope"], {}, ("command_not_found", "command")),
        (["/tmp/lost"], {}, ("command_not_found", "command")),
        (["/tmp/plain"], {}, ("command_not_executable", "command")),
        (["/tmp/exe"], {}, ("command_not_executable", "command")),
        (["/tmp"], {}, ("command_not_executable", "command")),
        (["true"], {"cwd": "/nope"}, ("not_found", "cwd")),
        (["true"], {"cwd": "/etc/passwd"}, ("not_found", "cwd")),
        (["true"], {"cwd": "/tmp/closed", "user": "user"}, ("permission_denied", "cwd")),
        (["true"], {"cwd": "tmp"}, ("invalid_argument", "cwd")),
        (["true"], {"user": "nobody-here"}, ("not_found", "user")),
        (["true"], {"user": "70000"}, ("invalid_argument", "user")),
        (["true"], {"env": ("novalue",)}, ("invalid_argument", "env")),
        (["true", "a\0b"], {}, ("invalid_argument", "command")),
        ([""], {}, ("invalid_argument", "command")),
        (["true"], {"open_files": 10**7}, ("invalid_argument", "open_files")),
    ]:
        for keep in (False, True):
            assert await box.refusal(request(argv, keep=keep, **more)) == wanted, (argv, more, keep)
    reply = await box.agent.call(wire.ListProcessesRequest())
    assert reply == wire.ProcessesReply(items=())


async def test_what_a_command_sees_of_itself(box: Box) -> None:
    env = ("PATH=/opt/x:/bin", "A=b c")
    ran = await box.sh("env; pwd; id -u; id -g; id -G; umask; stat -c %u /w; cat /proc/self/oom_score_adj",
                       env=env, cwd="/w/x", make_cwd=True, user="1234:5678")  # fmt: skip
    lines = ran.out.decode().splitlines()
    assert {"PATH=/opt/x:/bin", "A=b c", "HOME=/"} <= set(lines)
    assert lines[-7:] == ["/w/x", "1234", "5678", "5678", "0022", "0", "500"]
    ran = await box.sh("echo $HOME; id -u; id -G; ulimit -n; ulimit -c; grep -c . /proc/self/status; echo $PATH",
                       user="user", env=())  # fmt: skip
    assert ran.out.split()[:6] == [b"/home/user", b"1000", b"1000", b"44", b"256", b"0"]
    ran = await box.sh(
        "grep -E 'Cap(Eff|Bnd|Inh|Amb)|Seccomp:|SigBlk|SigIgn' /proc/self/status; ls /proc/self/fd | wc -l"
    )
    fields = dict(line.split(":\t") for line in ran.out.decode().splitlines() if ":\t" in line)
    assert fields["CapEff"] == fields["CapBnd"] != "000001ffffffffff"
    assert int(fields["SigBlk"], 16) == int(fields["SigIgn"], 16) == 0
    assert fields["Seccomp"] == "2"
    assert ran.out.split()[-1] == b"4"


async def test_bytes_pass_unchanged(box: Box) -> None:
    data = bytes(range(256)) * 5000
    ran = await box.run("cat", stdin=data)
    assert ran.out == data and ran.ended.stdout_total == len(data) and ran.err == b""
    ran = await box.sh("printf out; printf err >&2")
    assert (ran.out, ran.err) == (b"out", b"err")


async def test_small_pieces_are_gathered_and_all_of_them_come(box: Box) -> None:
    message = request(["sh", "-c", "i=0; while [ $i -lt 20000 ]; do echo $i; i=$((i+1)); done"])
    frames: list[bytes] = []
    async with await box.agent.begin(message) as channel:
        while not isinstance(frame := await channel.receive(), wire.EndedReply):
            if isinstance(frame, tuple):
                frames.append(frame[1])
    assert b"".join(frames) == b"".join(b"%d\n" % i for i in range(20000))
    assert len(frames) < 2000, "a turn for every line is what a neighbour would pay for"


async def test_much_output_on_both_streams_waits_for_the_reader(box: Box) -> None:
    ran = await box.sh("head -c 20000000 /dev/zero & head -c 20000000 /dev/zero >&2; wait")
    assert (len(ran.out), len(ran.err)) == (20_000_000, 20_000_000)
    message = request(["sh", "-c", "head -c 3000000 /dev/zero"], stream=False)
    async with await box.agent.begin(message) as channel:
        ran = await collect(channel)
    assert (ran.out, ran.ended.stdout_total) == (b"", 3_000_000)


async def test_a_background_holder_does_not_hold_the_end(box: Box) -> None:
    begun = time.monotonic()
    ran = await box.sh("sleep 600 & echo hi")
    assert ran.out == b"hi\n" and time.monotonic() - begun < 1
    assert (await box.sh("pidof sleep")).code == 0


TREE = """
cd /tmp; grow() { while :; do echo x >> $1; sleep 0.05 2>/dev/null; done; }
grow a & setsid sh -c 'while :; do echo x >> b; sleep 0.05; done' &
(setsid sh -c '(while :; do echo x >> c; sleep 0.05; done) &' &)
sh -c 'trap "" TERM INT HUP; while :; do echo x >> d; sleep 0.05; done' & sleep 100
"""


async def sizes(box: Box) -> list[int]:
    return [item.size for item in await box.list("/tmp")]


async def test_a_timeout_ends_the_whole_tree(box: Box) -> None:
    begun = time.monotonic()
    ran = await box.sh(TREE, timeout_ms=600)
    assert ran.ended.outcome == "timeout" and time.monotonic() - begun < 1.5
    before = await sizes(box)
    await asyncio.sleep(0.3)
    assert await sizes(box) == before and len(before) == 4 and min(before) > 0
    assert (await box.sh("pidof sleep")).code == 1


@pytest.mark.parametrize("flood", [False, True])
async def test_a_closed_connection_ends_the_whole_tree(box: Box, flood: bool) -> None:
    text = TREE.replace("sleep 100", "cat /dev/zero") if flood else TREE
    async with await box.agent.begin(request(["sh", "-c", text], timeout_ms=None)) as channel:
        await channel.receive()
        await asyncio.sleep(0.3)
    await asyncio.sleep(0.2)
    before = await sizes(box)
    await asyncio.sleep(0.2)
    assert await sizes(box) == before and len(before) == 4


async def test_a_timeout_ends_a_command_whose_reader_stands_still(box: Box) -> None:
    async with await box.agent.begin(request(["cat", "/dev/zero"], timeout_ms=300)) as channel:
        await asyncio.sleep(0.6)
        assert (await box.sh("pidof cat")).code == 1
        ran = await collect(channel)
    assert ran.ended.outcome == "timeout" and ran.ended.stdout_total >= len(ran.out) > 0


async def test_orphans_are_reaped(box: Box) -> None:
    for _ in range(20):
        await box.sh("for i in $(seq 20); do (sleep 0.01 &) ; done")
    await asyncio.sleep(0.5)
    ran = await box.sh("grep -l 'State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l; ls -d /proc/[0-9]* | wc -l")
    zombies, processes = map(int, ran.out.split())
    assert zombies == 0 and processes < 8


async def test_kept_processes_outlive_their_connection(box: Box) -> None:
    message = request(["sh", "-c", "for i in 1 2 3; do echo $i; sleep 0.1; done; cat; exit 7"], keep=True, stdin=True,
                      process_id="kept")  # fmt: skip
    async with await box.agent.begin(message) as channel:
        assert isinstance(await channel.receive(), wire.StartedReply)
    await asyncio.sleep(0.5)
    listed = await box.agent.call(wire.ListProcessesRequest())
    assert isinstance(listed, wire.ProcessesReply)
    assert [(item.process_id, item.ended, item.stdout_total) for item in listed.items] == [("kept", None, 6)]
    async with await box.agent.begin(wire.WriteStdinRequest(process_id="kept", close=True)) as channel:
        await channel.send(b"more")
        await channel.end_of_input()
        assert isinstance(await channel.receive(), wire.DoneReply)
    for _ in range(2):
        attach = wire.AttachRequest(process_id="kept", stdout_from=2, stderr_from=0, stream=True)
        async with await box.agent.begin(attach) as channel:
            ran = await collect(channel)
        assert (ran.out, ran.code, ran.ended.stdout_total) == (b"2\n3\nmore", 7, 10)
    async with await box.agent.begin(message) as channel:
        assert (await collect(channel)).out == b"1\n2\n3\nmore"
    assert isinstance(await box.agent.call(wire.ForgetRequest(process_id="kept")), wire.DoneReply)
    assert await box.refusal(wire.ForgetRequest(process_id="kept")) == ("not_found", "process")


async def test_a_stopped_reader_stops_nobody(box: Box) -> None:
    size = 30_000_000
    message = request(
        ["sh", "-c", f"sleep 0.3; head -c {size} /dev/zero"], keep=True, process_id="k", output_limit=1 << 20
    )
    attach = wire.AttachRequest(process_id="k", stdout_from=0, stderr_from=0, stream=True)
    async with await box.agent.begin(message) as stopped:
        await stopped.receive()
        async with await box.agent.begin(attach) as channel:
            ran = await collect(channel)
        assert ran.ended.stdout_total == size
        got = len(ran.out)
        assert got == size or ran.lost
        late = await collect(stopped)
        assert late.ended.stdout_total == size and late.lost and late.lost[-1].stream == "stdout"
    async with await box.agent.begin(attach) as channel:
        again = await collect(channel)
    assert len(again.out) == 1 << 20 and again.lost[0].offset == size - (1 << 20)


async def test_signals_reach_leader_or_tree(box: Box) -> None:
    text = "trap 'echo got; exit 3' USR1; sh -c 'trap \"echo child\" USR1; while :; do sleep 0.05; done' & while :; do sleep 0.05; done"
    for tree, words in ((False, {b"got"}), (True, {b"got", b"child"})):
        async with await box.agent.begin(request(["sh", "-c", text], process_id="s", keep=True)) as channel:
            await asyncio.sleep(0.3)
            await box.agent.call(wire.SignalRequest(process_id="s", signal=10, tree=tree))
            await asyncio.sleep(0.3)
            ran = await collect(channel)
        assert ran.code == 3 and set(ran.out.split()) >= words and (tree or b"child" not in ran.out)
        await box.agent.call(wire.ForgetRequest(process_id="s"))
    assert (await box.sh("pidof sleep")).code == 1


async def test_a_terminal(box: Box) -> None:
    size = wire.PtySize(cols=101, rows=37)
    message = request(["sh", "-c", "tty; stty size; read x; stty size; echo got $x; ls -l $(tty); echo z > $(tty)"],
                      pty=size, stdin=True, process_id="t", user="user")  # fmt: skip
    async with await box.agent.begin(message) as channel:
        seen = b""
        while b"37 101" not in seen:
            frame = await channel.receive()
            seen += frame[1] if isinstance(frame, tuple) else b""
        await box.agent.call(wire.ResizeRequest(process_id="t", size=wire.PtySize(cols=80, rows=24)))
        await channel.send(b"word\n")
        ran = await collect(channel)
    assert ran.code == 0
    text = (seen + ran.out).decode()
    assert "/dev/pts/" in text and "24 80" in text and "got word" in text and "user" in text and text.endswith("z\r\n")
    for _ in range(5):
        ran = await box.run("sh", "-c", "i=0; while [ $i -lt 200 ]; do echo line $i; i=$((i+1)); done", pty=size)
        assert ran.out.count(b"\r\n") == 200


async def test_nothing_of_the_sandbox_is_needed(box: Box) -> None:
    await box.sh("rm -rf /bin/sh /bin/bash; chmod 000 /etc/passwd; kill -9 -1")
    assert await box.refusal(request(["sh"])) == ("command_not_found", "command")
    assert (await box.run("/bin/busybox", "id", "-u")).out == b"0\n"
    assert len(await box.list("/")) > 5
    assert await box.read("/etc/group") != b""


async def test_many_at_once_and_little_left(box: Box) -> None:
    async def one(number: int) -> None:
        assert (await box.sh(f"echo {number}", env=ENV)).out == f"{number}\n".encode()

    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(one(number))
    reply = await box.agent.call(wire.ListProcessesRequest())
    assert reply == wire.ProcessesReply(items=())
