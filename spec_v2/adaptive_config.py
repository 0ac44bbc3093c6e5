"""Which settings adaptive speculation may choose from, and how fast it does: defaults, or a JSON file.

```json
{"1": {"candidate_steps": [0, 1, 3, 5]}, "8": {"candidate_steps": [0, 1, [3, 4, 8]]}, "ema_alpha": 0.2}
```

A batch uses the entry of the largest batch size that is not above its own (the first entry, where all are). A number
of steps is a chain of that many drafts; 0 drafts nothing; three numbers are steps, topk and draft tokens. The names
are SGLang's, but for `hysteresis`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from spec_v2.server_args import ServerArgs

Setting = tuple[int, int, int]  # (num_steps, topk, num_draft_tokens)

NO_DRAFTS: Setting = (0, 1, 1)
CHAINS = (1, 2, 3, 5, 8, 12)
"""Lengths of the chains that are tried by default. Few, as each is another recording on a GPU."""

_NAME = "speculative_adaptive_config (--speculative-adaptive-config)"
_THRESHOLDS = ("up_hysteresis", "down_hysteresis", "ceiling_coeff")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveConfig:
    """`candidates`: settings from a batch size on; empty for the defaults.

    `ema_alpha`: the weight of the newest step in the acceptance rates. `update_interval`: steps at a setting before
    another is considered, `warmup_batches` the same for the first one. `hysteresis`: how much faster another setting
    has to be, as a share.
    """

    candidates: Mapping[int, tuple[Setting, ...]]
    ema_alpha: float = 0.1
    update_interval: int = 5
    warmup_batches: int = 5
    hysteresis: float = 0.05

    def largest(self) -> Setting | None:
        """The greatest of each number, or None where the file names no setting that drafts."""
        drafting = [s for settings in self.candidates.values() for s in settings if s != NO_DRAFTS]
        if not drafting:
            return None
        steps, topk, tokens = (max(column) for column in zip(*drafting, strict=True))
        return steps, topk, tokens


def read_config(args: ServerArgs) -> AdaptiveConfig:
    """The file that `args` name, or the defaults. Raises ValueError naming the file, the key and the remedy."""
    if args.speculative_adaptive_config is None:
        return AdaptiveConfig(candidates={})
    path = Path(args.speculative_adaptive_config)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{_NAME} is {str(path)!r}: {error}; name a readable JSON file") from error
    if not isinstance(content, dict):
        raise _error(
            path, f"holds {content!r}", 'give an object, such as {"1": {"candidate_steps": [0, 1, 3]}}'
        )
    candidates: dict[int, tuple[Setting, ...]] = {}
    options: dict[str, Any] = {}
    for key, value in content.items():
        if key.isdecimal():
            candidates[int(key)] = _candidates(path, key, value)
        else:
            options[key] = _option(path, key, value)
    return AdaptiveConfig(candidates=dict(sorted(candidates.items())), **options)


def candidate_settings(args: ServerArgs, config: AdaptiveConfig) -> dict[int, tuple[Setting, ...]]:
    """From which batch size on which settings may be chosen, cheapest first. `args` are resolved.

    The memory of a step is reserved for the three numbers of `args`, so no candidate exceeds any of them. Raises
    ValueError for one that does, or that is no tree.
    """
    largest = (args.num_steps, args.topk, args.num_draft_tokens)
    if not config.candidates:
        return {1: default_candidates(largest)}
    for size, settings in config.candidates.items():
        for setting in settings:
            _check_fits(args, f'candidate_steps of "{size}"', setting, largest)
    return {size: tuple(sorted(set(settings), key=_cost)) for size, settings in config.candidates.items()}


def default_candidates(largest: Setting) -> tuple[Setting, ...]:
    """No drafts, a few chains, the largest setting, and for a tree one of half its size."""
    steps, topk, tokens = largest
    found = {NO_DRAFTS, largest, *((n, 1, n + 1) for n in CHAINS if n <= steps and n < tokens)}
    if topk > 1:
        half = (steps + 1) // 2
        found.add((half, topk, min((tokens + 1) // 2, capacity(half, topk))))
    return tuple(sorted((s for s in found if s[2] > 1 or s == NO_DRAFTS), key=_cost))


def capacity(num_steps: int, topk: int) -> int:
    """Nodes of the largest tree that so many steps of that width can give, the root included."""
    return 1 + topk + (num_steps - 1) * topk**2


def _cost(setting: Setting) -> tuple[int, int, int]:
    steps, topk, tokens = setting
    return tokens, steps, topk


def _candidates(path: Path, size: str, entry: object) -> tuple[Setting, ...]:
    if not isinstance(entry, dict) or set(entry) != {"candidate_steps"}:
        unknown = sorted(set(entry) - {"candidate_steps"}) if isinstance(entry, dict) else entry
        raise _error(
            path,
            f'has {unknown!r} for batch size "{size}"',
            'give {"candidate_steps": [...]} there; all other keys are for all batch sizes',
        )
    steps = entry["candidate_steps"]
    if int(size) < 1:
        raise _error(path, f'has the batch size "{size}"', 'the smallest is "1"')
    if not isinstance(steps, list) or not steps:
        raise _error(path, f'has candidate_steps {steps!r} for "{size}"', "give a list that is not empty")
    return tuple(_setting(path, size, value) for value in steps)


def _setting(path: Path, size: str, value: object) -> Setting:
    if _is_count(value):
        return NO_DRAFTS if value == 0 else (value, 1, value + 1)
    if isinstance(value, list) and len(value) == 3 and all(_is_count(x) and x > 0 for x in value):
        steps, topk, tokens = value
        return steps, topk, tokens
    raise _error(
        path,
        f'has {value!r} in candidate_steps of "{size}"',
        "give a number of steps from 0 on, or [steps, topk, draft tokens], each at least 1",
    )


def _option(path: Path, key: str, value: object) -> object:
    if key in _THRESHOLDS:
        raise _error(
            path,
            f"has {key}",
            'it moves SGLang\'s thresholds on accept lengths; here measured speeds are compared: give "hysteresis"'
            ", how much faster another setting must be (0.05 is 5%)",
        )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    checks = {
        "ema_alpha": (is_number and 0 < value <= 1, "a number above 0 and at most 1"),  # type: ignore[operator]
        "update_interval": (_is_count(value) and value != 0, "a whole number of at least 1"),
        "warmup_batches": (_is_count(value), "a whole number of at least 0"),
        "hysteresis": (is_number and 0 <= value < 1, "a number of at least 0 and below 1"),  # type: ignore[operator]
    }
    if key not in checks:
        raise _error(path, f"has the key {key!r}", f"use batch sizes and {', '.join(checks)}")
    is_right, wanted = checks[key]
    if not is_right:
        raise _error(path, f"has {key} {value!r}", f"give {wanted}")
    return value


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _check_fits(args: ServerArgs, where: str, setting: Setting, largest: Setting) -> None:
    steps, topk, tokens = setting
    if setting == NO_DRAFTS:
        return
    if any(mine > most for mine, most in zip(setting, largest, strict=True)):
        raise ValueError(
            f"{_NAME} is {args.speculative_adaptive_config!r}: its {where} has {list(setting)}, more than"
            f" --speculative-num-steps {largest[0]}, --speculative-eagle-topk {largest[1]} and"
            f" --speculative-num-draft-tokens {largest[2]}, for which memory is reserved: raise these, or leave them"
            " out to have them follow the file"
        )
    most = steps + 1 if topk == 1 else capacity(steps, topk)
    if not 2 <= tokens <= most or (topk == 1 and tokens != most):
        raise ValueError(
            f"{_NAME} is {args.speculative_adaptive_config!r}: its {where} has {list(setting)}, but {steps} steps with"
            f" topk {topk} make {'exactly' if topk == 1 else '2 to'} {most} draft tokens, the root included"
        )


def _error(path: Path, what: str, remedy: str) -> ValueError:
    return ValueError(f"{_NAME} is {str(path)!r}: it {what}; {remedy}")
