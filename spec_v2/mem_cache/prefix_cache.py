"""Finished and running requests leave their KV here, page by page, for others that begin alike.

A tree of pages: an edge is the tokens of one page. For shifted drafts (EAGLE) the KV of position `p` depends on
token `p + 1` too, so an edge also holds the first token after its page: keys are token pairs, written as one
run. MTP modules look further ahead, each by one token more, and an edge holds as many. A page belongs to the tree from
the moment it enters; requests that use it hold a lock on its node.

A model with recurrent layers can go on from a prefix only where its state is known, so there a node may also hold a
*snapshot*: the row of the state pool with the state after its page. A match then ends at the last node that has one.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from spec_v2.mem_cache.allocator import PageAllocator, RowAllocator


@dataclass(eq=False, slots=True)
class Node:
    """One page. `locks` counts the requests that use this page or one below it; `state_row` 0 is no snapshot."""

    parent: "Node | None"
    key: tuple[int, ...]
    page: int
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)
    locks: int = 0
    last_used: int = 0
    state_row: int = 0


class PrefixCache:
    """`match` and `lock` on admission, `insert` as KV becomes final, `unlock` at release, `evict` when short.

    `lookahead`: tokens behind a page that its KV depends on. `snapshots`: hands out rows for states; None for models
    without recurrent layers.
    """

    def __init__(
        self,
        pages: PageAllocator,
        *,
        lookahead: int,
        enabled: bool = True,
        snapshots: RowAllocator | None = None,
    ) -> None:
        self.pages = pages
        self.snapshots = snapshots
        self.lookahead = lookahead
        self.enabled = enabled
        self._clock = 0
        self.reset()

    def reset(self) -> None:
        """Forget every page, without freeing any."""
        self.root = Node(None, (), 0)
        self.num_pages = 0
        self.num_evictable = 0

    def match(self, tokens: Sequence[int]) -> list[Node]:
        """The nodes of the longest prefix to go on from, root excluded. At least one token is left to compute."""
        path = self.known(tokens)
        while self.snapshots is not None and path and not path[-1].state_row:
            path.pop()
        return path

    def known(self, tokens: Sequence[int]) -> list[Node]:
        """The nodes of the longest prefix whose KV is here, with a snapshot at its end or not."""
        path: list[Node] = []
        node = self.root
        while self.enabled and (len(path) + 1) * self.pages.page_size < len(tokens):
            child = node.children.get(self._key(tokens, len(path)))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def new_snapshot(self) -> int:
        """A row for a state: a free one, else that of the snapshot used least recently, if nobody uses its node; or 0."""
        if self.snapshots is None or not self.enabled:
            return 0
        if not self.snapshots.num_free:
            idle = [n for n in self._nodes() if n.state_row and n.locks == 0]
            if not idle:
                return 0
            oldest = min(idle, key=lambda n: n.last_used)
            self._drop_snapshot(oldest)
        return self.snapshots.alloc()

    def keep_snapshot(self, tokens: Sequence[int], length: int, row: int) -> bool:
        """Give the tree the state after `length` of `tokens`. False where it does not have their last page (yet)."""
        assert self.snapshots is not None
        path = self.known(tokens)[: length // self.pages.page_size]
        if len(path) * self.pages.page_size < length:
            return False
        if path[-1].state_row:
            self.snapshots.free(row)
        else:
            path[-1].state_row = row
        return True

    def insert(self, tokens: Sequence[int], pages: Sequence[int], path: list[Node]) -> None:
        """Give the tree a request's pages behind `path`, its locked nodes; `path` grows by what it took.

        `tokens`: those whose KV is final, plus the one after them where keys look ahead. Stops at a page that
        the tree has already from somebody else: the request keeps its own copy until release.
        """
        node = path[-1] if path else self.root
        while self.enabled and self._is_full(len(path), len(tokens)):
            key = self._key(tokens, len(path))
            if key in node.children:
                return
            child = Node(node, key, pages[len(path)], last_used=self._tick())
            node.children[key] = child
            self.num_pages += 1
            self.num_evictable += 1
            self.lock([child])
            path.append(child)
            node = child

    def lock(self, path: Sequence[Node]) -> None:
        """Count one more user of each node. Locking a whole path locks each node once."""
        for node in path:
            self.num_evictable -= node.locks == 0
            node.locks += 1
            node.last_used = self._tick()

    def unlock(self, path: Sequence[Node]) -> None:
        """Count one user less."""
        for node in path:
            node.locks -= 1
            self.num_evictable += node.locks == 0

    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages that nobody uses, least recently used first. Returns how many."""
        idle = [(n.last_used, id(n), n) for n in self._nodes() if not n.children and n.locks == 0]
        heapq.heapify(idle)
        freed = 0
        while idle and freed < num_pages:
            node = heapq.heappop(idle)[2]
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            self.pages.free([node.page])
            self._drop_snapshot(node)
            self.num_pages -= 1
            self.num_evictable -= 1
            freed += 1
            if parent is not self.root and not parent.children and parent.locks == 0:
                heapq.heappush(idle, (parent.last_used, id(parent), parent))
        return freed

    def _drop_snapshot(self, node: Node) -> None:
        if self.snapshots is not None and node.state_row:
            self.snapshots.free(node.state_row)
            node.state_row = 0

    def _nodes(self) -> list[Node]:
        found, stack = [], list(self.root.children.values())
        while stack:
            node = stack.pop()
            found.append(node)
            stack += node.children.values()
        return found

    def _key(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        size = self.pages.page_size
        return tuple(tokens[index * size : (index + 1) * size + self.lookahead])

    def _is_full(self, index: int, num_tokens: int) -> bool:
        return (index + 1) * self.pages.page_size + self.lookahead <= num_tokens

    def _tick(self) -> int:
        self._clock += 1
        return self._clock
