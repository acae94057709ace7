"""What all of LLaMA-Factory's backends have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from topoplan.trainers.environment import EnvVar

LAUNCHER = '-m llamafactory.launcher "$bundle_dir/train.yaml"'
"""What each process runs: launcher.py calls `run_exp` as a module, and `read_args` takes argv[1] as the YAML."""

CACHING_ALLOCATOR = EnvVar(
    name="PYTORCH_CUDA_ALLOC_CONF",
    value="expandable_segments:True",
    reason="less fragmentation; llamafactory-cli sets it too",
)


def dataset_directory(values: Mapping[str, Any]) -> str | None:
    """The directory with dataset_info.json; None when the data comes from a hub or an earlier tokenising."""
    directory = str(values["dataset_dir"])
    if directory == "ONLINE" or directory.startswith("REMOTE:") or values.get("tokenized_path"):
        return None
    return directory
