"""Whatever is drafted, the tokens are those of plain decoding: greedy, and sampled with seeds (item 1)."""

from itertools import combinations

import pytest

from tests.cells import CHAINS_ONLY, DRAFTERS, all_cells, pairwise_cells, run_cell
from tests.harness import Coverage

CELLS = pairwise_cells()


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in CELLS])
def test_identity(cell, schedule, device):
    run_cell(cell, schedule, device)


@pytest.mark.parametrize("algorithm", [name for name in DRAFTERS if name])
def test_the_cells_exercise_what_can_go_wrong(algorithm, schedule, device):
    coverage = Coverage()
    for cell in CELLS:
        if cell.algorithm == algorithm:
            coverage.merge(run_cell(cell, schedule, device))
    coverage.check(has_trees=algorithm not in CHAINS_ONLY)


def test_each_pair_of_values_occurs():
    def pairs(cells):
        return {pair for cell in cells for pair in combinations(enumerate(cell), 2)}

    assert pairs(CELLS) == pairs(all_cells())
    assert len(CELLS) <= 48
