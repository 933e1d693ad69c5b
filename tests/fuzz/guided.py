"""python -m fuzz.guided TARGET: one in-process target under atheris, which looks for inputs that reach new branches."""

import argparse
import importlib
import sys
from collections.abc import Callable

import atheris

# Target -> its module here, and the modules of DSec whose branches guide it.
TARGETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tar": ("archives", ("dsec.images", "dsec.rules.compose")),
    "raw_tar": ("archives", ("dsec.images.tar",)),
    "layers": ("archives", ("dsec.rules.compose", "dsec.images.tar")),
    "unpack": ("archives", ("dsec.images.spool",)),
    "imports": ("archives", ("dsec.images",)),
    "parts": ("archives", ("dsec.images.index", "dsec.images.manifests", "dsec.images.records")),
    "dockerfile": ("builds", ("dsec.rules",)),
    "patterns": ("builds", ("dsec.rules.patterns", "dsec.rules.scrub")),
    "download": ("download", ("dsec.sdk",)),
    "upload": ("download", ("dsec.sdk",)),
    "replies": ("replies", ("dsec.edge.agent",)),
    "api": ("api", ("dsec.edge", "dsec.web")),
    "proxy": ("api", ("dsec.edge.ports", "dsec.web")),
}


def load(name: str) -> Callable[[bytes], None]:
    module, guided = TARGETS[name]
    with atheris.instrument_imports(include=list(guided), enable_loader_override=False):
        return getattr(importlib.import_module(f"fuzz.{module}"), name)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(prog="fuzz.guided")
    parser.add_argument("target", choices=sorted(TARGETS))
    given, libfuzzer = parser.parse_known_args()
    atheris.Setup([sys.argv[0], *libfuzzer], load(given.target))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
