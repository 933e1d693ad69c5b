"""Answers that are no success become errors of the taxonomy."""

import msgspec
import pytest

import dsec
from dsec.model.errors import BY_CODE
from dsec.model.views import Problem
from dsec.sdk.records import HttpResponse
from dsec.sdk.wire import error_from_close, error_from_response


@pytest.mark.parametrize("code", BY_CODE)
def test_every_code_comes_back_as_its_class(code: str) -> None:
    kind = BY_CODE[code]
    document = Problem(type="", title="t", status=kind.status, code=code, fields={"what": "x", "detail": "not twice"})
    error = error_from_response(kind.status, msgspec.json.encode(document))
    assert type(error) is kind and error.what == "x" and str(error) == "t"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(302, dsec.Unavailable), (404, dsec.NotFound), (410, dsec.SandboxLost), (418, dsec.RuntimeFailure), (502, dsec.Unavailable),
     (504, dsec.DeadlineExceeded)],
)  # fmt: skip
def test_an_answer_without_a_problem_document_is_known_by_its_status(status: int, kind: type[Exception]) -> None:
    assert type(error_from_response(status, b"<html>")) is kind


def test_a_document_nested_too_deeply_is_none() -> None:
    deep = b'{"fields":' + b'{"a":' * 5000
    assert type(error_from_response(502, deep)) is dsec.Unavailable
    with pytest.raises(ValueError, match="recursion"):
        HttpResponse(status=200, headers={}, content=deep).json()


def test_a_code_of_a_newer_server_is_a_runtime_failure_that_names_it() -> None:
    document = Problem(type="", title="t", status=500, code="invented_later")
    error = error_from_response(500, msgspec.json.encode(document))
    assert type(error) is dsec.RuntimeFailure and error.unknown_code == "invented_later"


def test_close_codes() -> None:
    assert type(error_from_close(4410, "gone", "x")) is dsec.SandboxLost
    assert type(error_from_close(1006, "", "x")) is dsec.Unavailable
    assert type(error_from_close(None, "", "x")) is dsec.Unavailable
