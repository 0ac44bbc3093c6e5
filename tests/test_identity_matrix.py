"""The full product behind `test_identity`; deselected by default (`pytest -m matrix`)."""

import pytest

from tests.cells import all_cells, run_cell


@pytest.mark.matrix
@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in all_cells()])
def test_identity(cell, schedule, device):
    run_cell.__wrapped__(cell, schedule, device)  # no need to remember hundreds of them
