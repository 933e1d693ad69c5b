"""The public names, exactly; and the blocking face, complete."""

import inspect
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import dsec
import dsec.sync

ROOT = Path(__file__).resolve().parents[3]
PUBLIC = """
Busy CommandFailed CommandNotExecutable CommandNotFound CommitReport Conflict DSecClient DSecContainerRunArgs
DSecError DeadlineExceeded End FileEvent FileView Files Flow HttpResponse ImageConfig ImageUnavailable ImageView
InfraError Interrupted InvalidArgument LimitReached Me MountSpec NetLimits NetworkRule NetworkView NotFound Outcome
Output PermissionDenied PreviewView Process ProcessView Pty QuotaExceeded Refusal RequestError Result RuntimeFailure
Sandbox SandboxEnd SandboxEvent SandboxFailed SandboxLost SandboxState SandboxView Session SessionView TaskError
TooLarge Transfer Tunnel Unauthenticated Unavailable Unsupported Usage sync
""".split()

METHODS = {
    "DSecClient": "close get image images me open run_container run_containers sandboxes stop_many",
    "Sandbox": "attach commit events exec files http id info metrics net_log network open_session phases preview previews processes renew revoke_preview run_shell sessions set_network_rules set_phase start stop tunnel view",
    "Process": "close_stdin detach id info resize signal stop stream view wait write",
    "Session": "close id run view",
    "Tunnel": "close read write",
    "Files": "download exists list mkdir move read read_stream read_text remove stat upload watch write write_text",
}


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


REQUEST_ID = {
    "DSecClient": "run_container run_containers stop_many",
    "Sandbox": "commit exec open_session preview renew run_shell set_network_rules set_phase start",
    "Process": "signal",
    "Session": "run",
    "Files": "mkdir move remove write",
}


@pytest.mark.parametrize("face", [dsec, dsec.sync])
def test_what_may_not_be_done_twice_takes_a_request_id(face: typing.Any) -> None:
    """Closing, stopping, resizing and looking may be; a tree is uploaded once, or again."""
    for kind, names in REQUEST_ID.items():
        found = getattr(face, kind, None) or getattr(dsec, kind)
        for name in names.split():
            assert "request_id" in inspect.signature(getattr(found, name)).parameters, f"{kind}.{name}"


def test_the_public_names_are_exactly_these() -> None:
    assert sorted(dsec.__all__) == sorted(PUBLIC) == dir(dsec)
    for name in PUBLIC:
        assert getattr(dsec, name) is not None
    with pytest.raises(AttributeError):
        _ = dsec.no_such_name
    assert sorted(dsec.sync.__all__) == sorted(METHODS)


@pytest.mark.parametrize("name", ["DSecMicroVMRunArgs", "DSecFullVMRunArgs", "DSecFnCallArgs"])
def test_published_names_of_other_backends_are_refused_when_called(name: str) -> None:
    with pytest.raises(dsec.Unsupported, match="backend is not part of this version"):
        getattr(dsec, name)(container_image="x")
    assert name not in dir(dsec)


def test_every_error_of_the_taxonomy_is_public() -> None:
    kinds = {
        name for name in dir(sys.modules["dsec.model.errors"]) if isinstance(getattr(dsec.model.errors, name), type)
    }
    errors = {name for name in kinds if issubclass(getattr(dsec.model.errors, name), dsec.DSecError)}
    assert errors <= set(PUBLIC)


@pytest.mark.parametrize("name", METHODS)
def test_methods_are_exactly_these_on_both_faces(name: str) -> None:
    expected = set(METHODS[name].split())
    assert public(getattr(dsec, name)) == expected
    extra = set() if name == "DSecClient" else {"inner"}
    assert public(getattr(dsec.sync, name)) == expected | extra


def blocking(text: str) -> str:
    if "AsyncGenerator[" in text:
        text = text.replace("AsyncGenerator[", "Generator[").replace(", None]", ", None, None]")
    for old, new in [("AsyncIterable", "Iterable"), ("_async", "_sync")]:
        text = text.replace(old, new)
    return text.replace("'", "")


@pytest.mark.parametrize("name", METHODS)
def test_blocking_signatures_and_documents_equal_the_asynchronous(name: str) -> None:
    for method in [*METHODS[name].split(), *(["__init__"] if name == "DSecClient" else [])]:
        there, here = vars(getattr(dsec, name))[method], vars(getattr(dsec.sync, name))[method]
        assert isinstance(there, property) == isinstance(here, property)
        if isinstance(there, property):
            there, here = there.fget, here.fget
        assert not inspect.iscoroutinefunction(here) and not inspect.isasyncgenfunction(here)
        first, second = inspect.signature(there, eval_str=True), inspect.signature(here, eval_str=True)
        assert list(first.parameters) == list(second.parameters)
        for parameter in first.parameters:
            old, new = first.parameters[parameter], second.parameters[parameter]
            assert (old.kind, old.default) == (new.kind, new.default)
            assert blocking(str(old.annotation)) == str(new.annotation).replace("'", "")
        assert blocking(str(first.return_annotation)) == str(second.return_annotation).replace("'", "")
        assert (there.__doc__ is None) == (here.__doc__ is None)


def test_every_public_thing_has_a_docstring() -> None:
    for name in PUBLIC:
        assert inspect.getdoc(getattr(dsec, name)), name
    for name, methods in METHODS.items():
        for method in methods.split():
            assert inspect.getdoc(getattr(getattr(dsec, name), method)), f"{name}.{method}"


def test_the_blocking_face_is_the_generated_one() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools/unasync.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unused_rule_of_the_generator_is_an_error(tmp_path: Path) -> None:
    text = (ROOT / "tools/unasync.py").read_text().replace("WORDS = {", 'WORDS = {"no such words": "x",')
    text = text.replace("Path(__file__).resolve().parent.parent", f"Path({str(ROOT)!r})")
    (tmp_path / "changed.py").write_text(text)
    done = subprocess.run(
        [sys.executable, tmp_path / "changed.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "no such words" in done.stderr


def test_importing_a_room_loads_no_client() -> None:
    code = "import sys, dsec, dsec.model.views; sys.exit(any(n in sys.modules for n in ('aiohttp', 'dsec.sdk')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_client_needs_only_client_dependencies() -> None:
    node = (
        "starlette",
        "uvicorn",
        "uvloop",
        "sqlalchemy",
        "zstandard",
        "cryptography",
        "dsec._core",
        "dsec.kernel",
        "dsec.edge",
    )
    code = f"import sys, dsec.sync; dsec.DSecClient; print([n for n in {node!r} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_result_hints_hold() -> None:
    hints = typing.get_type_hints(dsec.CommandFailed)
    assert hints["result"] is dsec.Result
