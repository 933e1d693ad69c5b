"""One request to the platform, for verbs that need no sandbox: a key's or a project's."""

import ssl
import urllib.error
import urllib.request
from typing import Any

import msgspec

from dsec.model.errors import DeadlineExceeded, Unavailable, error_from_code
from dsec.model.views import Problem
from dsec.sdk.environment import find_endpoint

__all__ = ["ask"]

_DEADLINE = 30.0
_ANSWER_MAX = 64 << 20


def ask(method: str, path: str, body: Any = None, kind: Any = None) -> Any:
    """The answer as `kind`; None for an empty one. Raises the error that the platform names, Unavailable without one."""
    endpoint = find_endpoint()
    request = urllib.request.Request(
        endpoint.url + path,
        method=method,
        data=None if body is None else msgspec.json.encode(body),
        headers={"authorization": f"Bearer {endpoint.api_key}", "content-type": "application/json"},
    )
    trust = ssl.create_default_context(cafile=endpoint.ca_file) if endpoint.url.startswith("https:") else None
    try:
        with urllib.request.urlopen(request, timeout=_DEADLINE, context=trust) as answer:
            data = answer.read(_ANSWER_MAX)
    except urllib.error.HTTPError as error:
        try:
            problem = msgspec.json.decode(error.read(_ANSWER_MAX), type=Problem)
        except (msgspec.DecodeError, RecursionError):
            raise Unavailable(f"{endpoint.url} answers {error.code} and no problem document") from error
        raise error_from_code(problem.code, problem.detail, problem.fields) from error
    except TimeoutError as error:
        raise DeadlineExceeded(f"no answer from {endpoint.url} in {_DEADLINE:.0f} s") from error
    except OSError as error:
        raise Unavailable(f"{endpoint.url}: {getattr(error, 'reason', error)}") from error
    return msgspec.json.decode(data, type=kind) if data and kind is not None else None
