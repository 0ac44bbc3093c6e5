"""Comments that silence findings, and the baseline of findings that are known and accepted.

x = old()          # sv: ignore[SV101]      this line, this code; without brackets all codes
x = old()          # noqa: SV101            the same, as linters spell it
# sv: ignore[SV101]                         alone on a line: the next line
# sv: ignore-file                           the whole file
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

from legacy_compat.scan.finding import Finding
from legacy_compat.scan.text import Places

COMMENT = re.compile(
    r"(?:#|//|<!--|%|;)\s*(?:"
    r"sv:\s*ignore(?P<file>-file)?(?:\[(?P<codes>[\w,\s]*)\])?"
    r"|noqa(?::\s*(?P<noqa>[A-Z]+\d+(?:[,\s]+[A-Z]+\d+)*))?(?![\w:]))",
    re.IGNORECASE,
)
BASELINE_VERSION = 1


class Suppressions:
    """What the comments of one text silence."""

    def __init__(self, text: str) -> None:
        self.lines: dict[int, set[str]] = {}  # line -> codes; "*" stands for all
        self.file: set[str] = set()
        lowered = text.lower()
        if "noqa" not in lowered and "sv:" not in lowered:
            return
        places = Places(text)
        for found in COMMENT.finditer(text):
            codes = set(re.findall(r"\w+", (found["codes"] or found["noqa"] or "").upper())) or {"*"}
            line, column = places.at(found.start())
            if found["file"]:
                self.file |= codes
            else:
                alone = not places.line(line)[: column - 1].strip() and found[0].lower().find("noqa") < 0
                self.lines.setdefault(line + 1 if alone else line, set()).update(codes)

    def __bool__(self) -> bool:
        return bool(self.lines or self.file)

    def cover(self, line: int, end_line: int, code: str) -> bool:
        """Whether a finding from `line` to `end_line` is silenced."""
        held = self.file.union(
            *(self.lines.get(number, ()) for number in range(line, min(end_line, line + 50) + 1))
        )
        return "*" in held or code in held


# --- the baseline file ---


def fingerprint(found: Finding) -> str:
    """The same for a finding after lines were added above it, or its line was indented."""
    parts = (Path(found.path).as_posix(), found.code, found.name, " ".join(found.source.split()))
    return hashlib.sha256("\0".join(parts).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def read_baseline(path: Path) -> Counter[str]:
    """How often each finding is accepted. Raises ValueError if the file is not a baseline."""
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        if held["version"] != BASELINE_VERSION:
            raise ValueError(f"its version is {held['version']!r}, expected {BASELINE_VERSION}")
        return Counter({item["fingerprint"]: int(item["count"]) for item in held["findings"]})
    except OSError as error:
        raise ValueError(f"--baseline {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--baseline {path}: not a baseline ({error}); write one with --write-baseline"
        ) from None


def write_baseline(path: Path, findings: list[Finding]) -> None:
    counts = Counter(map(fingerprint, findings))
    about = {fingerprint(found): found for found in findings}
    items = [
        {
            "fingerprint": key,
            "count": count,
            "path": Path(about[key].path).as_posix(),
            "code": about[key].code,
            "name": about[key].name,
        }
        for key, count in counts.items()
    ]
    items.sort(key=lambda item: (item["path"], item["code"], item["name"], item["fingerprint"]))
    text = json.dumps({"tool": "legacy_compat", "version": BASELINE_VERSION, "findings": items}, indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def without_known(findings: list[Finding], known: Counter[str]) -> list[Finding]:
    """The findings that the baseline doesn't hold; of several alike, as many as it doesn't hold."""
    left = Counter(known)
    fresh = []
    for found in findings:
        key = fingerprint(found)
        if left[key] > 0:
            left[key] -= 1
        else:
            fresh.append(found)
    return fresh
