"""A command from request to result, through the aether of its sandbox."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import blake2b

from dsec.edge.lifecycle import Lifecycle
from dsec.edge.output import Clipped
from dsec.edge.pulse import answers
from dsec.edge.resident import Resident
from dsec.model import aether as wire
from dsec.model.errors import DSecError, InvalidArgument, NotFound, RuntimeFailure, SandboxLost, error_from_code
from dsec.model.outcome import ExecResult, Outcome
from dsec.model.plan import Usage
from dsec.model.views import ExecRequest, PtySize, SessionRun
from dsec.ports.agent import Channel
from dsec.ports.backend import BackendFailure
from dsec.ports.clock import Clock
from dsec.rules.environ import within
from dsec.rules.lifecycle import Observed
from dsec.rules.verdict import Counters, verdict

__all__ = [
    "OUTPUT_LIMIT_MAX", "Execution", "broken", "failed", "milliseconds", "name_of", "opened", "pty_size", "reply_error", "send_all", "wire_request",
]  # fmt: skip

OUTPUT_LIMIT_MAX = 64 << 20
INLINE_STDIN = 32 << 10
_ARGV_BYTES_MAX = 512 << 10
_TIMEOUT_MAX = 30 * 86400.0
_END_PATIENCE = 0.5
_ANSWER_PATIENCE = 2.0
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._~-]{0,127}\Z")

_log = logging.getLogger("dsec.edge")


def name_of(request_id: str | None, clock: Clock) -> str:
    """A process's or session's id: its request_id where that can stand in a path, else made from it; random without one."""
    if request_id is None:
        return clock.random(8).hex()
    return request_id if _PLAIN.match(request_id) else "r" + blake2b(request_id.encode(), digest_size=15).hexdigest()


def reply_error(reply: wire.FailedReply) -> Exception:
    """aether's refusal as an error."""
    return error_from_code(reply.code, reply.detail, {"what": reply.what} if reply.what else None)


def failed(frame: object) -> Exception:
    """The error for a frame that was not expected: the one it carries, or RuntimeFailure."""
    if isinstance(frame, wire.FailedReply):
        return reply_error(frame)
    return RuntimeFailure(f"aether answered {type(frame).__name__} out of turn")


@asynccontextmanager
async def opened(resident: Resident, request: wire.Request) -> AsyncIterator[Channel]:
    """One operation of its aether; a channel that breaks is told as how the sandbox ended, where that is known soon."""
    try:
        async with await resident.live_agent().begin(request) as channel:
            yield channel
    except SandboxLost as error:
        raise await broken(resident, error) from error


async def broken(resident: Resident, error: SandboxLost) -> DSecError:
    """The error of a broken channel: the sandbox's end if it comes within moments, RuntimeFailure where its aether still answers
    and only what served this operation died."""
    if not resident.ending.is_set() and await answers(resident, _ANSWER_PATIENCE):
        return RuntimeFailure("the operation's connection broke; its sandbox goes on", sandbox_id=resident.id)
    try:
        # Nobody listens any more: that it ended is told by the kernel within moments.
        async with asyncio.timeout(_END_PATIENCE):
            await resident.ending.wait()
    except TimeoutError:
        resident.doubted = True
        return error
    return resident.lost()


def milliseconds(timeout: float | None) -> int | None:
    """A timeout in seconds as aether takes it. Raises InvalidArgument."""
    if timeout is None:
        return None
    if not 0 < timeout <= _TIMEOUT_MAX:
        raise InvalidArgument("more than 0 s, at most 30 days, or null for none", field="timeout")
    return max(1, round(timeout * 1000))


def _checked_limit(limit: int) -> int:
    if not 0 <= limit <= OUTPUT_LIMIT_MAX:
        raise InvalidArgument(f"0 to {OUTPUT_LIMIT_MAX} bytes", field="output_limit")
    return limit


def pty_size(size: PtySize, field: str = "size") -> wire.PtySize:
    """A terminal's size as aether takes it. Raises InvalidArgument."""
    if not (1 <= size.cols <= 1000 and 1 <= size.rows <= 1000):
        raise InvalidArgument("1 to 1000 columns and rows", field=field)
    return wire.PtySize(cols=size.cols, rows=size.rows)


def _argv(request: ExecRequest) -> tuple[str, ...]:
    if (request.shell is None) == (not request.argv):
        raise InvalidArgument("give `argv` or `shell`", field="argv")
    argv = request.argv if request.shell is None else ("/bin/sh", "-c", request.shell)
    if sum(len(part.encode(errors="replace")) + 1 for part in argv) > _ARGV_BYTES_MAX:
        raise InvalidArgument(f"at most {_ARGV_BYTES_MAX} bytes together", field="argv")
    if not argv[0] or any("\0" in part for part in argv):
        raise InvalidArgument(
            "the first is not empty, none holds NUL", field="argv" if request.shell is None else "shell"
        )
    return argv


def wire_request(
    resident: Resident, request: ExecRequest, process_id: str, *, keep: bool, stream: bool
) -> wire.ExecRequest:
    """What aether is asked. Raises InvalidArgument naming the field."""
    env, cwd, make_cwd, user = within(resident.surroundings, request.env, request.cwd, request.user)
    return wire.ExecRequest(
        process_id=process_id,
        argv=_argv(request),
        env=env,
        cwd=cwd,
        make_cwd=make_cwd,
        user=user,
        stdin=bool(request.stdin) or request.keep_stdin,
        pty=None if request.pty is None else pty_size(request.pty, "pty"),
        timeout_ms=milliseconds(request.timeout),
        output_limit=_checked_limit(request.output_limit),
        keep=keep,
        open_files=resident.row.spec.open_files_limit,
        stream=stream,
    )


async def send_all(channel: Channel, data: bytes, *, end: bool) -> None:
    """Sends bytes in frames, and the end of input after them."""
    for start in range(0, len(data), wire.MAX_PAYLOAD):
        await channel.send(data[start : start + wire.MAX_PAYLOAD])
    if end:
        await channel.end_of_input()


class Execution:
    """Runs commands and classes their ends."""

    def __init__(self, lifecycle: Lifecycle, clock: Clock) -> None:
        self._lifecycle = lifecycle
        self._clock = clock

    async def run(self, resident: Resident, request: ExecRequest, request_id: str | None) -> ExecResult:
        """Runs a command to its end; cancelling ends its whole process tree. Raises CommandNotFound, CommandNotExecutable,
        InvalidArgument, SandboxLost."""
        if request.pty is not None or request.keep_stdin:
            raise InvalidArgument(
                "only for a started process", field="pty" if request.pty is not None else "keep_stdin"
            )
        process_id = name_of(request_id, self._clock)
        wanted = wire_request(resident, request, process_id, keep=False, stream=True)
        with self._lifecycle.expiry.active(resident):
            before = Counters(resident.oom_kills, resident.pids_refused)
            async with opened(resident, wanted) as channel:
                if len(request.stdin) <= INLINE_STDIN:
                    if request.stdin:
                        await send_all(channel, request.stdin, end=True)
                    ended, out, err = await self._collect(channel, request.output_limit)
                else:
                    ended, out, err = await self._fed(channel, request)
            return await self.result(resident, ended, (out, err), before, (request.timeout, process_id, request_id))

    async def run_in_session(
        self, resident: Resident, session_id: str, request: SessionRun, request_id: str | None
    ) -> ExecResult:
        """Runs a command in a session, after the ones before it."""
        if "\0" in request.command or len(request.command.encode(errors="replace")) > _ARGV_BYTES_MAX:
            raise InvalidArgument(f"no NUL, at most {_ARGV_BYTES_MAX} bytes", field="command")
        process_id = name_of(request_id, self._clock)
        wanted = wire.RunInSessionRequest(
            session_id=session_id,
            process_id=process_id,
            command=request.command,
            timeout_ms=milliseconds(request.timeout),
            output_limit=_checked_limit(request.output_limit),
        )
        lock = resident.session_locks.setdefault(session_id, asyncio.Lock())
        async with lock:
            with self._lifecycle.expiry.active(resident):
                before = Counters(resident.oom_kills, resident.pids_refused)
                try:
                    async with opened(resident, wanted) as channel:
                        ended, out, err = await self._collect(channel, request.output_limit)
                except NotFound:  # any name may be asked for: those that are no session are not kept
                    resident.session_locks.pop(session_id, None)
                    raise
                if ended.session_ended:
                    resident.session_locks.pop(session_id, None)
                return await self.result(resident, ended, (out, err), before, (request.timeout, process_id, request_id))

    async def _fed(self, channel: Channel, request: ExecRequest) -> tuple[wire.EndedReply, Clipped, Clipped]:
        """Takes the output while it sends the input, so that neither waits for the other for ever."""
        found: tuple[wire.EndedReply, Clipped, Clipped] | DSecError
        async with asyncio.TaskGroup() as group:
            feeder = group.create_task(self._feed(channel, request.stdin))
            try:
                found = await self._collect(channel, request.output_limit)
            except DSecError as error:  # raised outside the group, which would wrap it
                found = error
            feeder.cancel()
        if isinstance(found, DSecError):
            raise found
        return found

    @staticmethod
    async def _feed(channel: Channel, data: bytes) -> None:
        """A command that does not read all of its input is no failure: the result tells how it ended."""
        try:
            await send_all(channel, data, end=True)
        except SandboxLost as error:
            _log.debug("input of a command was not taken to its end: %s", error)

    @staticmethod
    async def _collect(channel: Channel, limit: int) -> tuple[wire.EndedReply, Clipped, Clipped]:
        out, err = Clipped(limit), Clipped(limit)
        receive = channel.receive
        while True:
            frame = await receive()
            if type(frame) is tuple:
                (out if frame[0] == wire.FRAME_STDOUT else err).add(frame[1])
            elif isinstance(frame, wire.EndedReply):
                return frame, out, err
            elif not isinstance(frame, wire.StartedReply | wire.LostReply):
                raise failed(frame)

    async def result(
        self,
        resident: Resident,
        ended: wire.EndedReply,
        output: tuple[Clipped, Clipped],
        before: Counters,
        asked: tuple[float | None, str, str | None],
    ) -> ExecResult:
        """The result of an ended command. `asked`: its timeout, process id and request_id."""
        timeout, process_id, request_id = asked
        outcome, limit = await self.outcome(resident, ended, before)
        infra = ended.exit_code != 0 and await self.image_failed(resident)
        out, err = output
        return ExecResult(
            outcome=outcome,
            exit_code=ended.exit_code,
            signal=ended.signal,
            stdout=out.value(),
            stderr=err.value(),
            truncated=out.truncated or err.truncated,
            stdout_bytes_total=out.total,
            stderr_bytes_total=err.total,
            duration=ended.duration_ms / 1000.0,
            limit=timeout if outcome is Outcome.TIMEOUT else limit,
            request_id=request_id or "",
            process_id=process_id,
            infra=infra,
        )

    async def image_failed(self, resident: Resident) -> bool:
        """Whether reads of its layers failed since that was last asked; its story tells it then."""
        try:
            errors = await self._lifecycle.parts.images.read_errors(resident.row.composition.layers)
        except DSecError as error:
            _log.warning("sandbox %s: nobody says whether its image could be read: %s", resident.id, error)
            return False
        count, resident.image_errors = errors - resident.image_errors, errors
        if count <= 0:
            return False
        self._lifecycle.feed(
            resident,
            Observed("image_unreadable", f"{count} reads of its layers failed: their store gave nothing", count),
        )
        return True

    async def outcome(
        self, resident: Resident, ended: wire.EndedReply, before: Counters
    ) -> tuple[Outcome, float | None]:
        """How a command ended, and the limit it reached; the kernel is asked only about one that failed."""
        outcome = Outcome(ended.outcome)
        if ended.exit_code == 0 or outcome is Outcome.TIMEOUT:
            return outcome, None
        usage = await self.usage(resident)
        if usage is None:
            return outcome, None
        return verdict(outcome, ended.exit_code, ended.signal, before, usage, resident.row.spec.pids_limit)

    async def usage(self, resident: Resident) -> Usage | None:
        """What the sandbox uses, None where it cannot be told any more; out-of-memory kills not yet told become events."""
        if resident.handle is None:
            return None
        try:
            usage = await resident.backend.usage(resident.handle)
        except BackendFailure as failure:
            _log.info("sandbox %s: no usage: %s", resident.id, failure.detail)
            return None
        self._lifecycle.killed(resident, usage.oom_kills)
        resident.pids_refused = max(resident.pids_refused, usage.pids_refused)
        return usage
