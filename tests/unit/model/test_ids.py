"""Sandbox ids: one spelling each, not to be forged, readable by the holder of the key."""

import os

import pytest

from dsec.model.errors import NotFound
from dsec.model.ids import ID_LENGTH, RANDOM_BYTES, SandboxAddress, decode_sandbox_id, encode_sandbox_id

KEY = bytes(range(32))
LETTERS = "abcdefghijklmnopqrstuvwxyz234567"


@pytest.mark.parametrize("address", [(0, 0), (65535, (1 << 24) - 1), (1, 7)])
def test_what_goes_in_comes_out(address: tuple[int, int]) -> None:
    made = SandboxAddress(*address, os.urandom(RANDOM_BYTES))
    text = encode_sandbox_id(made, KEY)
    assert len(text) == ID_LENGTH and text.isalnum() and text == text.lower()
    assert decode_sandbox_id(text, KEY) == made


def test_no_other_spelling_is_taken() -> None:
    text = encode_sandbox_id(SandboxAddress(3, 4, os.urandom(RANDOM_BYTES)), KEY)
    others = [
        text[:at] + letter + text[at + 1 :]
        for at in range(ID_LENGTH)
        for letter in LETTERS + "10=S"
        if letter != text[at]
    ]
    for other in [*others, text.upper(), text + "a", text[:-1], "", "s" * ID_LENGTH, "é" * ID_LENGTH]:
        with pytest.raises(NotFound):
            decode_sandbox_id(other, KEY)
    with pytest.raises(NotFound):
        decode_sandbox_id(text, b"x" * 32)
