"""Names of images as tags of a registry, and back: a tag has no `/`, `:`, `@` or `+`, so these are escaped with `_`."""

import re
import urllib.parse

from dsec.images.names import check_name
from dsec.images.stores.layout import Item
from dsec.model.errors import InvalidArgument

__all__ = ["KNOWN_TAG", "layer_tag", "name_of_tag", "tag_of_name"]

KNOWN_TAG = "_known-"
_LAYER_TAG = "_l-"
_NAME_TAG = "_n-"
_ESCAPES = {"_": "__", "/": "_s", ":": "_c", "@": "_a", "+": "_p"}
_BACK = {escape: plain for plain, escape in _ESCAPES.items()}
_MAX = 128


def layer_tag(layer: str) -> str:
    """The tag of the layer with these hexadecimal digits."""
    return _LAYER_TAG + layer


def tag_of_name(item: Item) -> str:
    """The tag of a name's item. Raises InvalidArgument for a name that is too long for one."""
    name = urllib.parse.unquote(item.name)
    tag = "".join(_ESCAPES.get(char, char) for char in name)
    if name.startswith("sha256-"):
        tag = _NAME_TAG + tag  # such tags list referrers
    if len(tag) > _MAX:
        raise InvalidArgument(f"{name!a} is too long for a tag of a registry", field="name")
    return tag


def name_of_tag(tag: str) -> str | None:
    """The name that a tag is for; None for tags that are for something else."""
    escaped = tag.removeprefix(_NAME_TAG)
    if escaped == tag and tag.startswith(("_", "sha256-")):
        return None
    name = re.sub(r"_.", lambda match: _BACK.get(match[0], "\0"), escaped)
    try:
        return check_name(name)
    except InvalidArgument:
        return None
