"""Tar archives that a careful writer would never write: wrong in one place, and whole around it."""

import gzip
from dataclasses import dataclass

import zstandard

from fuzz.draw import Draw

BLOCK = 512
NAMES = (
    b"a", b"b", b"a/b", b"d/", b"d/x", b"d", b"a/b/c", b"../x", b"d/../../x", b"/abs", b".wh.a", b".wh..wh..opq", b"d/.wh.x",
    b".wh.", b".wh..wh.plnk", b".", b"./", b"", b"a" * 100, b"d/" * 60 + b"x", b"\xff\xfe", b"n" * 256, b"caf\xc3\xa9", b"a\0b",
    b"to/x", b"to", b"d//x/", b"oci-layout", b"index.json", b"manifest.json",
)  # fmt: skip
TARGETS = (
    b"a", b"d", b"b", b"..", b"../..", b"/", b"/etc/passwd", b"/w/tree", b"/w/tree/d", b"to", b"d/x", b"", b".", b"x" * 100,
    b"d/../../secret", b"../secret",
)  # fmt: skip
KINDS = b"0\x00157213456SDVMNZ"
KEYS = (
    b"path", b"linkpath", b"size", b"mtime", b"uid", b"gid", b"uname", b"hdrcharset", b"SCHILY.xattr.user.a",
    b"SCHILY.xattr.trusted.overlay.opaque", b"SCHILY.xattr.security.capability", b"GNU.sparse.major", b"GNU.sparse.minor",
    b"GNU.sparse.name", b"GNU.sparse.realsize", b"GNU.sparse.size", b"GNU.sparse.map", b"GNU.sparse.offset",
    b"GNU.sparse.numbytes", b"GNU.sparse.numblocks",
)  # fmt: skip
VALUES = (
    b"0", b"1", b"512", b"1.5", b"-1", b"-1.999999999", b"99999999999999999999", b"9" * 5000, b"0,1,5,2", b"1e999", b"nan",
    b"1_0", b" 7", b"", b"inf", b"0,0", b"4611686018427387904",
)  # fmt: skip


@dataclass(frozen=True)
class Archive:
    """An archive, and whether its writer meant no harm: then every reader has to agree on what is in it."""

    raw: bytes
    honest: bool


def number(value: int, width: int, binary: bool = False) -> bytes:
    """A numeric field: octal where it fits, else base-256."""
    if binary or not 0 <= value < 8 ** (width - 1):
        return (value % (1 << (8 * width - 1)) | 1 << (8 * width - 1)).to_bytes(width, "big")
    return b"%0*o\0" % (width - 1, value)


def summed(block: bytes) -> bytes:
    """The header with its checksum made right."""
    total = sum(block) - sum(block[148:156]) + 8 * 32
    return block[:148] + b"%06o\0 " % total + block[156:]


def header(name: bytes, kind: int, size: int = 0, target: bytes = b"", **fields: int) -> bytes:
    """A ustar header. `fields`: mode, uid, gid, mtime."""
    block = name[:100].ljust(100, b"\0") + number(fields.get("mode", 0o644), 8) + number(fields.get("uid", 0), 8)
    block += number(fields.get("gid", 0), 8) + number(size, 12) + number(fields.get("mtime", 0), 12) + b" " * 8
    block += bytes((kind,)) + target[:100].ljust(100, b"\0") + b"ustar\x0000" + bytes(64) + number(0, 8) + number(0, 8)
    return summed(block.ljust(BLOCK, b"\0"))


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


def record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return str(length).encode() + body


def extended(draw: Draw) -> bytes:
    """A header that speaks of the next entry: PAX records or a GNU long name."""
    if draw.once_in(3):
        text = draw.of((*NAMES, *TARGETS)) + b"\0" * draw.below(2)
        return header(b"././@LongLink", draw.of(b"LK"), len(text)) + padded(text)
    body = b""
    for _ in range(1 + draw.below(4)):
        value = draw.bytes(draw.number()) if draw.once_in(4) else draw.of((*VALUES, *NAMES, *TARGETS))
        body += record(draw.of(KEYS), value)
    if draw.once_in(8):
        body = body[: draw.below(len(body))] + draw.bytes(8) + body[draw.below(len(body)) :]
    return header(b"pax", draw.of(b"xxxxxXg"), len(body)) + padded(body)


def _honest(draw: Draw, long_names: bool) -> bytes:
    """An entry that every reader has to understand alike."""
    name, kind = draw.of((b"a", b"b", b"d/x", b"d/y/z", b"caf\xc3\xa9", b"a" * 100)), draw.of(b"0001256")
    data = draw.bytes(draw.number()) if kind == ord("0") else b""
    target = draw.of((b"a", b"d/x", b"../b", b"x" * 90)) if kind in b"12" else b""
    made = header(name, kind, len(data), target, mode=draw.number(2) & 0o7777, uid=draw.number(3), mtime=draw.number(4))
    before = b""
    if long_names and draw.once_in(2):
        text = draw.of((b"n" * 150, b"d/" + b"m" * 200)) + b"\0"
        before = header(b"././@LongLink", ord("L"), len(text)) + padded(text)
    elif draw.once_in(2):
        body = record(b"path", draw.of((b"p" * 150, b"d/q"))) + record(b"mtime", draw.of((b"1.5", b"-1", b"77.25")))
        before = header(b"pax", ord("x"), len(body)) + padded(body)
    return before + made + padded(data)


def _sparse(draw: Draw, name: bytes) -> bytes:
    """An old GNU sparse file, its map and its sizes as it likes."""
    count = draw.below(5)
    data = draw.bytes(draw.number())
    block = bytearray(header(name, ord("S"), len(data)))
    for index in range(count):
        block[386 + 24 * index : 410 + 24 * index] = number(draw.number(2), 12) + number(draw.number(), 12)
    block[257:265] = b"ustar  \0"
    block[482] = draw.below(3) == 1
    block[483:495] = number(draw.number(2), 12, binary=draw.once_in(4))
    more = draw.bytes(BLOCK).ljust(BLOCK, b"\0") if block[482] and not draw.once_in(4) else b""
    return summed(bytes(block)) + more + padded(data)


def _member(draw: Draw) -> bytes:
    if draw.once_in(4):
        return extended(draw)
    if draw.once_in(8):
        return _sparse(draw, draw.of(NAMES))
    kind = draw.of(KINDS)
    data = draw.bytes(draw.number()) if draw.once_in(2) else b""
    block = bytearray(
        header(draw.of(NAMES), kind, len(data), draw.of(TARGETS), mode=draw.number(2), uid=draw.number(), mtime=draw.number(4))
    )  # fmt: skip
    if draw.once_in(3):
        at, width = draw.of(((100, 8), (108, 8), (116, 8), (124, 12), (136, 12), (329, 8), (337, 8)))
        signed = draw.number(width) - (1 << 30)
        block[at : at + width] = draw.of((number(signed, width, binary=True), draw.bytes(width).ljust(width, b"\0")))
    if draw.once_in(6):
        at = draw.below(BLOCK)
        block[at : at + 8] = draw.bytes(8).ljust(8, b"\0")
        del block[BLOCK:]
        block.extend(bytes(BLOCK - len(block)))
    return (bytes(block) if draw.once_in(16) else summed(bytes(block))) + padded(data)


def archive(draw: Draw, most: int = 40) -> Archive:
    """Members, honest or not, then perhaps damage to the whole."""
    honest, long_names = draw.once_in(3), draw.once_in(2)
    parts = []
    while draw and len(parts) < most:
        parts.append(_honest(draw, long_names) if honest else _member(draw))
        if not honest and draw.once_in(16):
            break
    raw = b"".join(parts) + bytes(2 * BLOCK)
    if honest or not draw.once_in(4):
        return Archive(raw if honest or not draw.once_in(6) else raw[: draw.below(len(raw))], honest)
    at = draw.below(len(raw))
    return Archive(raw[:at] + draw.bytes(16) + raw[at + draw.below(600) :], False)


def packed(draw: Draw, raw: bytes) -> bytes:
    """`raw` plain or compressed: several members, cut, spoilt, padded, with something behind it."""
    way = draw.below(4)
    if way == 0:
        return raw
    pack = (lambda part: gzip.compress(part, 1, mtime=0)) if way < 3 else zstandard.ZstdCompressor(level=1).compress
    at = draw.below(len(raw) + 1)
    out = pack(raw[:at]) + pack(raw[at:]) if draw.once_in(3) else pack(raw)
    if draw.once_in(4):
        out = out[: draw.below(len(out))]
    if draw.once_in(4):
        spot = draw.below(len(out) + 1)
        out = out[:spot] + draw.bytes(4) + out[spot + 4 :]
    if draw.once_in(4):
        out += draw.of((bytes(700), b"\x1f\x8b", b"junk", b"\x50\x2a\x4d\x18\x04\0\0\0abcd"))
    return out
