"""How findings are shown: for people, for programs, for code scanning, for GitHub's log."""

from legacy_compat.scan.output.github import as_github
from legacy_compat.scan.output.json_report import as_json
from legacy_compat.scan.output.sarif import as_sarif
from legacy_compat.scan.output.text import as_text, counted, summary

FORMATS = ("text", "concise", "json", "sarif", "github")

__all__ = ["FORMATS", "as_github", "as_json", "as_sarif", "as_text", "counted", "summary"]
