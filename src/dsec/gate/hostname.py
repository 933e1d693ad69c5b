"""Host names as the gate compares them: ASCII, lower case, no trailing dot, labels of letters, digits, hyphens, underscores."""

import re

from dsec.gate.refusal import Refused

__all__ = ["LONGEST", "hostname"]

LONGEST = 253
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")


def hostname(raw: bytes) -> str:
    """The name in the form for comparisons. Raises Refused: `bad_name`, or `address` for what is an address and no name."""
    try:
        name = raw.decode("ascii").lower()
    except UnicodeDecodeError as error:
        raise Refused("bad_name", "a name with bytes outside ASCII") from error
    name = name.removesuffix(".")
    labels = name.split(".")
    if not name or len(name) > LONGEST or not all(_LABEL.fullmatch(label) for label in labels):
        raise Refused("bad_name", f"{name[:80]!a} is no host name")
    if labels[-1].isdigit() or re.fullmatch(r"0x[0-9a-f]*", labels[-1]):
        raise Refused("address", f"{name[:80]!a} is an address, not a name")
    return name
