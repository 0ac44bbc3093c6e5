"""Bytes to text and back without a loss, and places in a text."""

from __future__ import annotations

import codecs
import io
import re
import tokenize
from bisect import bisect_right
from dataclasses import dataclass

from legacy_compat.scan.finding import Span

NEWLINE = re.compile(r"\r\n|\r|\n")
BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16: its mark begins with UTF-16's
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


@dataclass(frozen=True, slots=True)
class Decoded:
    """A file's text, and what it takes to write it back byte for byte."""

    text: str
    encoding: str
    errors: str
    bom: bytes

    def encode(self, text: str) -> bytes:
        return self.bom + text.encode(self.encoding, self.errors)


def decode(data: bytes) -> Decoded | None:
    """Any text file; undecodable bytes survive as surrogates. None for binary data."""
    for bom, encoding in BOMS:
        if data.startswith(bom):
            errors = "surrogateescape" if encoding == "utf-8" else "strict"
            try:
                return Decoded(data[len(bom) :].decode(encoding, errors), encoding, errors, bom)
            except UnicodeDecodeError:
                return None
    if b"\0" in data[:8192]:
        return None
    return Decoded(data.decode("utf-8", "surrogateescape"), "utf-8", "surrogateescape", b"")


def decode_python(data: bytes) -> Decoded:
    """Python source by its BOM and its coding comment. Raises SyntaxError as Python does, or UnicodeError."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    bom = codecs.BOM_UTF8 if encoding == "utf-8-sig" else b""
    encoding = "utf-8" if bom else encoding
    return Decoded(data[len(bom) :].decode(encoding), encoding, "strict", bom)


class Places:
    """Offsets, lines and columns of one text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.starts = [0, *(found.end() for found in NEWLINE.finditer(text))]

    def line(self, number: int) -> str:
        """The line with this number, without its end."""
        if not 1 <= number <= len(self.starts):
            return ""
        start = self.starts[number - 1]
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    def offset(self, line: int, column: int) -> int:
        """Of a line and a column, both from 1."""
        return self.starts[line - 1] + column - 1

    def at(self, offset: int) -> tuple[int, int]:
        line = bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1

    def span(self, start: int, end: int) -> Span:
        """Of the characters from offset `start` up to `end`."""
        return Span(*self.at(start), *self.at(end))

    def column_of_bytes(self, line: int, byte: int) -> int:
        """A column from 1 in characters, of ast's offset from 0 in UTF-8 bytes."""
        text = self.line(line)
        if text.isascii():
            return byte + 1
        return len(text.encode("utf-8", "surrogatepass")[:byte].decode("utf-8", "ignore")) + 1


def printable(text: str) -> str:
    """Bytes that were no text come as the replacement character: half of a surrogate pair may not leave here."""
    return "".join("\ufffd" if 0xD800 <= ord(char) <= 0xDFFF else char for char in text)
