"""The environment, directory and user that a command gets: image, then sandbox, then call, the later winning.

env: the image's, what tools need to find the mirrors of allowed services, the sandbox's `env` over it, the call's `env` over all; PATH and HOME are given where none of them has it
(HOME is `/root` for root; otherwise aether sets it from the sandbox's passwd file and falls back to `/`). cwd: the call's,
else the sandbox's, else the image's WORKDIR, else `/`; only WORKDIR and the sandbox's are created when they are missing. user:
the call's, else the sandbox's `init_user`, else the image's USER, else root.
ENTRYPOINT and CMD of an image are not run: a sandbox begins with nothing but aether, and runs what it is told.
"""

from collections.abc import Mapping

from msgspec import Struct

from dsec.model.errors import InvalidArgument
from dsec.model.layers import ImageConfig
from dsec.model.spec import SandboxSpec

__all__ = ["DEFAULT_PATH", "Surroundings", "surroundings", "within"]

_ENV_MAX = 200 * 1024

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Surroundings(Struct, frozen=True):
    """What a command gets when its call says nothing: made once a sandbox. `flat` is `env` as "K=V"."""

    env: dict[str, str]
    flat: tuple[str, ...]
    cwd: str
    user: str


def surroundings(config: ImageConfig, spec: SandboxSpec, mirrors: Mapping[str, str] | None = None) -> Surroundings:
    """The surroundings of a sandbox of an image with `config`. `mirrors`: variables by which tools find mirrors."""
    env: dict[str, str] = {"PATH": DEFAULT_PATH}
    for entry in config.env:
        key, _, value = entry.partition("=")
        env[key] = value
    env.update(mirrors or {})
    env.update(spec.env)
    user = spec.init_user or config.user or "0"
    if "HOME" not in env and user.partition(":")[0] in ("0", "root"):
        env["HOME"] = "/root"
    return Surroundings(env, _flat(env), spec.cwd or config.working_dir or "/", user)


def within(
    base: Surroundings, env: Mapping[str, str], cwd: str | None, user: str | None
) -> tuple[tuple[str, ...], str, bool, str]:
    """For one call: environment as "K=V", directory, whether to create it, user. Raises InvalidArgument."""
    flat = base.flat
    if env or (user is not None and user != base.user):
        merged = dict(base.env)
        if user is not None and user != base.user and merged.get("HOME") == "/root":
            del merged["HOME"]
        if "HOME" not in merged and user is not None and user.partition(":")[0] in ("0", "root"):
            merged["HOME"] = "/root"
        for key, value in env.items():
            if not key or "=" in key or "\0" in key or "\0" in value:
                raise InvalidArgument("names are not empty and hold no `=`, nothing holds NUL", field=f"env.{key[:64]}")
            merged[key] = value
        flat = _flat(merged)
        if sum(map(len, flat)) > _ENV_MAX:
            raise InvalidArgument(f"at most {_ENV_MAX} characters together with the sandbox's", field="env")
    if cwd is not None and (not cwd.startswith("/") or "\0" in cwd):
        raise InvalidArgument("an absolute path", field="cwd")
    if user is not None and (not user or "\0" in user or len(user) > 256):
        raise InvalidArgument("a name or number, with or without `:group`", field="user")
    return flat, base.cwd if cwd is None else cwd, cwd is None, base.user if user is None else user


def _flat(env: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in env.items())
