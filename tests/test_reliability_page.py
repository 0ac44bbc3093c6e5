"""docs/reliability.md names tests that exist, and says something of every row."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "reliability.md"
ROWS = [
    line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| [A-Z]{2}-\d\d ", line)
]
REASONS = ("Does not apply", "Not held")


def named_tests(text):
    return re.findall(r"`((?:kernels/)?test_\w+\.py)::(\w+)`", text)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:7])
def test_a_row_names_tests_that_exist_or_a_reason(row):
    _, _, source, symptom, held, _ = row.split("|")
    assert source.strip()
    assert symptom.strip()
    names = named_tests(held)
    assert names or held.strip().startswith(REASONS)
    for file, test in names:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file} has no {test}"
    assert "::" not in re.sub(r"`(?:kernels/)?test_\w+\.py::\w+`", "", held), (
        "a name that is not read as a test"
    )


def test_every_test_that_the_page_names_exists():
    """Those of faults and load too, whose rows have no id."""
    names = named_tests(PAGE.read_text(encoding="utf-8"))
    assert len(names) > 150
    for file, test in names:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {test}\(", text, re.MULTILINE), f"{file} has no {test}"


def test_each_id_has_one_row():
    ids = [row[2:7] for row in ROWS]
    assert len(ids) == len(set(ids))
    assert len(ids) > 100


def test_tests_named_after_an_id_stand_in_its_row():
    """A test that is called after a row of the page is not forgotten there, and the id is one of the page's."""
    ids = {row[2:7]: row for row in ROWS}
    missing = []
    for path in sorted([*TESTS.glob("test_*.py"), *TESTS.glob("kernels/test_*.py")]):
        for test in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE):
            for area, number in re.findall(r"_([a-z]{2})_?(\d\d)(?=_)", test):
                row = ids.get(f"{area.upper()}-{number}")
                if row is None:
                    missing.append(f"{test}: no row {area.upper()}-{number}")
    assert not missing
