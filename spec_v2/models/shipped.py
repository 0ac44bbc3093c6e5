"""Draft models that come with this package: for a built-in target, where the one for an algorithm lies."""

from pathlib import Path

from spec_v2.models.gguf_cache import PACKAGED_MODELS
from spec_v2.server_args import ServerArgs

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"

FOLDERS = {
    ("EAGLE3", False): "eagle3",
    ("EAGLE", False): "eagle",
    ("EAGLE", True): "mtp",
    ("FROZEN_KV_MTP", False): "frozen_kv_mtp",
    ("STANDALONE", False): "standalone",
}
"""(algorithm, enable_multi_layer_eagle) -> folder under `checkpoints/<target>/`."""


def shipped_draft(args: ServerArgs) -> str | None:
    """The folder of the draft model that fits these settings; None where this package brings none."""
    names = {name.casefold(): known.name for known in PACKAGED_MODELS for name in known.names}
    target = names.get(args.model_path.casefold())
    kind = FOLDERS.get((args.algorithm.name, args.enable_multi_layer_eagle))
    if target is None or kind is None:
        return None
    folder = CHECKPOINTS / target / kind
    return str(folder) if (folder / "config.json").is_file() else None
