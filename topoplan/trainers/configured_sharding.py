"""The sharding that a user's files and launcher configure. Only `check` reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from topoplan.reading.mpi import MPI
from topoplan.reading.processes import launch_of, visible_gpus
from topoplan.trainers import deepspeed_file, fsdp_file
from topoplan.trainers.sharding import Sharding

if TYPE_CHECKING:
    from topoplan.reading.setup import Setup
    from topoplan.reading.values import Keys


def sharding_of(keys: Keys, setup: Setup) -> Sharding:
    """Return the sharding of a configuration.

    Raises NotPredictedError if it depends on files or a launcher that are not available, or has no corresponding
    layout.
    """
    configuration = keys.configuration
    if written := keys.given("deepspeed"):
        return deepspeed_file.of_name(written, keys, setup, "deepspeed")
    if written := keys.given("fsdp"):
        return fsdp_file.of_keys(written, keys)
    launch = launch_of(setup, configuration)
    starter = launch.starter if launch else ""
    told = list(setup.of("accelerate"))
    if len(told) == 1 and starter in ("accelerate", ""):
        return fsdp_file.of_accelerate(told[0], keys, setup)
    key = next(
        (name for name in ("finetuning_type", "tuner_type", "train_type") if name in configuration.source.data),
        "deepspeed",
    )
    if starter in ("accelerate", "deepspeed"):
        keys.not_predicted((key,), f"what `{starter}` reads the sharding from was not given, and this")
    others = MPI & set(launch.wrappers) if launch and not starter else ()
    if others:
        keys.not_predicted((key,), f"what `{min(others)}` starts, and how many processes,")
    is_alone = launch is not None and visible_gpus(launch) == 1
    if configuration.trainer == "swift" and not (starter or is_alone or (launch and launch.variable("NPROC_PER_NODE"))):
        # cli/main.py starts one process; it spreads the model's layers over several visible GPUs (device_map auto).
        keys.not_predicted((key,), "one process that spreads the model over all GPUs that it sees (no NPROC_PER_NODE)")
    return Sharding()
