"""Words of a Dockerfile: how they are split, quoted, and how variables in them are replaced. Source: the Dockerfile reference.

Single quotes keep everything, double quotes all but variables and the escape character; the escape character outside of quotes
keeps the next character. `$name`, `${name}`, and with a colon (also for an empty value) or without one (unset alone):
`${name:-word}` (or else), `${name:+word}` (if there), `${name:?word}` (or refuse). A word in braces is itself replaced.
"""

from collections.abc import Mapping

from dsec.model.errors import InvalidArgument

__all__ = ["expand", "split_words"]

_BLANK = " \t\n"
_NAME_START = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_"
_NAME = _NAME_START + "0123456789"
_DEEPEST = 20
_LONGEST = 1 << 20


def split_words(text: str, escape: str) -> list[str]:
    """The words of `text`, with their quotes and escapes still in them. Raises InvalidArgument for a quote without its end."""
    words: list[str] = []
    word, quote, at = "", "", 0
    begun = False
    while at < len(text):
        letter = text[at]
        if letter == escape and quote != "'" and at + 1 < len(text):
            word += text[at : at + 2]
            begun, at = True, at + 2
            continue
        if not quote and letter in _BLANK:
            if begun:
                words.append(word)
            word, begun = "", False
        else:
            if quote == letter:
                quote = ""
            elif not quote and letter in "'\"":
                quote = letter
            word, begun = word + letter, True
        at += 1
    if quote:
        raise InvalidArgument(f"a {quote} without its end", field="dockerfile")
    if begun:
        words.append(word)
    return words


class _Reader:
    """Reads one word from `text`, replacing and unquoting as it goes."""

    def __init__(self, text: str, values: Mapping[str, str], escape: str, *, quotes: bool, depth: int) -> None:
        self.text = text
        self.at = 0
        self._values = values
        self._escape = escape
        self._quotes = quotes
        self._depth = depth

    def read(self, until: str) -> str:
        """Up to the character `until` outside of quotes ("": the end), which is not taken."""
        out: list[str] = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == until:
                break
            if letter == "'" and self._quotes:
                out.append(self._single())
            elif letter == '"' and self._quotes:
                out.append(self._double())
            elif letter == "$":
                out.append(self._variable())
            elif letter == self._escape:
                out.append(self._escaped())
            else:
                out.append(letter)
                self.at += 1
        return "".join(out)

    def _escaped(self) -> str:
        if self.at + 1 >= len(self.text):
            self.at += 1
            return self._escape
        following = self.text[self.at + 1]
        self.at += 2
        # Where quotes mean nothing, in here-documents, it protects variables and itself alone.
        return following if self._quotes or following in ("$", self._escape) else self._escape + following

    def _single(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise InvalidArgument("a ' without its end", field="dockerfile")
        inside, self.at = self.text[self.at + 1 : end], end + 1
        return inside

    def _double(self) -> str:
        self.at += 1
        out: list[str] = []
        while self.at < len(self.text):
            letter = self.text[self.at]
            if letter == '"':
                self.at += 1
                return "".join(out)
            if letter == "$":
                out.append(self._variable())
            elif letter == self._escape and self.text[self.at + 1 : self.at + 2] in ('"', "$", self._escape):
                out.append(self.text[self.at + 1])
                self.at += 2
            else:
                out.append(letter)
                self.at += 1
        raise InvalidArgument('a " without its end', field="dockerfile")

    def _variable(self) -> str:
        self.at += 1
        if self.text[self.at : self.at + 1] == "{":
            self.at += 1
            return self._braces()
        name = self._name()
        return self._values.get(name, "") if name else "$"

    def _name(self) -> str:
        start = self.at
        if self.text[start : start + 1] and self.text[start] in _NAME_START:
            while self.at < len(self.text) and self.text[self.at] in _NAME:
                self.at += 1
        return self.text[start : self.at]

    def _braces(self) -> str:
        name = self._name()
        if not name:
            raise InvalidArgument("${ without a name", field="dockerfile")
        colon = self.text[self.at : self.at + 1] == ":"
        self.at += colon
        sign = self.text[self.at : self.at + 1]
        if sign == "}" and not colon:
            self.at += 1
            return self._values.get(name, "")
        if sign not in ("-", "+", "?") or not sign:
            raise InvalidArgument(f"${{{name}: only :- :+ :? - + ? may follow a name", field="dockerfile")
        self.at += 1
        word = self._word()
        value = self._values.get(name)
        there = value is not None and (value != "" or not colon)
        if sign == "+":
            return word if there else ""
        if there:
            return value or ""
        if sign == "?":
            raise InvalidArgument(f"{name}: {word or 'is not set'}", field="dockerfile")
        return word

    def _word(self) -> str:
        if self._depth >= _DEEPEST:
            raise InvalidArgument(f"variables nested more than {_DEEPEST} deep", field="dockerfile")
        inner = _Reader(self.text, self._values, self._escape, quotes=self._quotes, depth=self._depth + 1)
        inner.at = self.at
        word = inner.read("}")
        if inner.at >= len(self.text):
            raise InvalidArgument("${ without its }", field="dockerfile")
        self.at = inner.at + 1
        return word


def expand(text: str, values: Mapping[str, str], escape: str, *, quotes: bool = True) -> str:
    """`text` as one word with its variables replaced and its quotes taken away. `quotes` False: quotes stay and mean nothing, as in a
    here-document. A variable that is not in `values` is empty.

    Raises InvalidArgument for a quote or brace without its end, a form of braces that is not known, a value that is asked for
    and missing, or more than 1 MiB of result.
    """
    out = _Reader(text, values, escape, quotes=quotes, depth=0).read("")
    if len(out) > _LONGEST:
        raise InvalidArgument(f"a word of more than {_LONGEST} characters", field="dockerfile")
    return out
