"""The witness knows what the counter in a sandbox writes, at any byte."""

from dsec.testing.witness import counted


def test_counted() -> None:
    text = b"".join(b"%d\n" % number for number in range(12_000))
    for start in [*range(400), *range(2880, 2900), *range(38_880, 38_900), 48_888, 48_889, 48_890, 48_891, 60_000]:
        assert counted(start, 37) == text[start : start + 37], start
