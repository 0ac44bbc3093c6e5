"""Host-side ownership: which pages and rows are free. No tensor, no device, no waiting."""

from collections.abc import Sequence


class PageAllocator:
    """Hands out whole pages of `page_size` slots. Page 0 is padding and never leaves.

    A freed page may be handed out at once: whoever writes it next is queued behind the step that reads it.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages={num_pages}: page 0 is padding, so at least 2 are needed")
        self.num_pages = num_pages
        self.page_size = page_size
        self.reset()

    def reset(self) -> None:
        """All pages are free."""
        self._free = list(range(self.num_pages - 1, 0, -1))
        self._is_free = [page > 0 for page in range(self.num_pages)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_pages - 1

    def ceil_pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` slots."""
        return -(-num_tokens // self.page_size)

    def alloc(self, num_pages: int) -> list[int]:
        """`num_pages` page numbers. Raises RuntimeError where fewer are free: admission asks first."""
        if num_pages > len(self._free):
            raise RuntimeError(f"{num_pages} pages wanted, {len(self._free)} free: admission let too much in")
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._is_free[page] = False
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Take pages back. Raises RuntimeError for a page that is free already or was never handed out."""
        for page in pages:
            if not 0 < page < self.num_pages or self._is_free[page]:
                raise RuntimeError(f"page {page} is not owned by anybody: freed twice?")
            self._is_free[page] = True
            self._free.append(page)

    def slots(self, pages: Sequence[int]) -> list[int]:
        """The slot numbers inside `pages`, in order."""
        return [page * self.page_size + i for page in pages for i in range(self.page_size)]


class RowAllocator:
    """Hands out rows `first .. num_rows - 1`, of the row table, the FutureMap, the state pool. Row 0 is padding."""

    def __init__(self, num_rows: int, first: int = 1) -> None:
        self.num_rows = num_rows
        self.first = first
        self.reset()

    def reset(self) -> None:
        """All rows are free."""
        self._free = list(range(self.num_rows - 1, self.first - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> int:
        return self._free.pop()

    def free(self, row: int) -> None:
        if not self.first <= row < self.num_rows or row in self._free:
            raise RuntimeError(f"row {row} is not owned by anybody: freed twice?")
        self._free.append(row)
