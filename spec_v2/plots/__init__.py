"""Figures of what happened: each function takes results and returns matplotlib Axes. It draws into `ax=` where given.

    from spec_v2 import plots

    with engine.record_steps() as steps:
        engine.generate("The capital of France is")
    plots.draft_tree(steps[0])      # what was drafted, what was accepted
    plots.timeline(engine.trace)    # what ran when

Nothing here changes matplotlib's settings; without `ax` a function makes a figure of its own with pyplot, so that a notebook
shows it. Colours are Okabe and Ito's, and a sign or a pattern says the same a second time.
"""

try:
    import matplotlib as mpl  # noqa: F401
except ImportError as error:  # pragma: no cover - the development environment has it
    raise ImportError("spec_v2.plots needs matplotlib: pip install 'spec-v2[viz]'") from error

from spec_v2.plots.acceptance import acceptance
from spec_v2.plots.draft_tree import draft_tree
from spec_v2.plots.kv_slots import kv_slots
from spec_v2.plots.speedup_model import speedup_model
from spec_v2.plots.timeline import timeline
from spec_v2.plots.tree_mask import tree_mask

__all__ = ["acceptance", "draft_tree", "kv_slots", "speedup_model", "timeline", "tree_mask"]
