"""Whatever is drafted, the tokens are those of plain decoding: greedy, and sampled with seeds (item 1)."""

from itertools import combinations

import pytest

from tests.cells import CHAINS_ONLY, DRAFTERS, Cell, all_cells, pairwise_cells, run_cell
from tests.harness import TREE_4, Coverage

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


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("algorithm", [name for name in DRAFTERS if name and name not in CHAINS_ONLY])
def test_kv01_trees_in_pages(algorithm, page_size, schedule, device):
    """Four branches, fewer nodes than a page has slots and more than it has left; all pages come back."""
    cells = [
        Cell(algorithm, DRAFTERS[algorithm][-1], TREE_4, page_size, 3, is_sampled, True)
        for is_sampled in (False, True)
    ]
    coverage = Coverage()
    for cell in cells:
        coverage.merge(run_cell(cell, schedule, device))
    assert coverage.moved
