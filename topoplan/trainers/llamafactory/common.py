"""What all of LLaMA-Factory's backends have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from topoplan.catalog.packages import releases
from topoplan.specs.job import Job
from topoplan.specs.spec import Spec
from topoplan.trainers import generated_samples
from topoplan.trainers.environment import EnvVar
from topoplan.trainers.llamafactory.key_list import missing_template
from topoplan.trainers.requirements import Versions
from topoplan.trainers.trainer import Checkpoints
from topoplan.trainers.usual import slow_precision

_LAUNCHER = '-m llamafactory.launcher "$bundle_dir/train.yaml" ${resume[@]+"${resume[@]}"}'
"""The command of each process: launcher.py as a module calls `run_exp`; `read_args` takes argv[1] as the YAML file and
the following words as overrides of its keys."""


def launcher(job: Job, further: str = "") -> str:
    """Return the command of each process, with overrides for keys whose values are files of the bundle."""
    words = [
        _LAUNCHER,
        further,
        beside("dataset_dir", generated_samples.DIRECTORY) if generated_samples.is_generated(job) else "",
    ]
    return " ".join(filter(None, words))


def beside(key: str, file: str) -> str:
    """Return an override for `launcher`: a key with the absolute path of a file in the bundle, quoted as YAML."""
    quote = "\\'"
    return f"\"{key}='${{bundle_dir//{quote}/{quote}{quote}}}/{file}'\""


RESUME_FROM = """\
resume=()
[[ -z "$last_checkpoint" ]] || resume=("resume_from_checkpoint='${last_checkpoint//\\'/\\'\\'}'")
"""
"""Bash code that must precede `launcher`."""

RESUME = """\
start it again in the same way. The script passes the last complete checkpoint in `output_dir` to the
  trainer, which skips the samples that it has already seen."""

CHECKPOINTS = Checkpoints(takes_any=True)
"""transformers/trainer.py, _save_checkpoint writes trainer_state.json last, on the first rank, after all others have
written their parts; hparams/parser.py uses get_last_checkpoint, which picks the one with the highest number."""

CACHING_ALLOCATOR = EnvVar(
    name="PYTORCH_CUDA_ALLOC_CONF",
    value="expandable_segments:True",
    reason="reduces fragmentation; llamafactory-cli sets it too",
)

RECORD_VRAM = EnvVar(
    name="RECORD_VRAM",
    value="1",
    reason="adds memory to trainer_log.jsonl, for `topoplan calibrate`",
)

VERSIONS = Versions(
    title="LLaMA-Factory",
    bounds={
        "mcore_adapter": (">=0.10.dev0", "0.0.1 on PyPI is an unrelated project of the same name"),
        # mcore_adapter 8eb27cc pyproject.toml: megatron-core>=0.15.0,<0.19.0
        "megatron-core": (">=0.15,<0.19", "mcore_adapter supports megatron-core 0.15 to 0.18"),
    },
    tried=lambda: {"megatron-core": (releases()[0].megatron_core, "0.18.2")},
)


def dataset_directory(values: Mapping[str, Any]) -> str | None:
    """Return the directory of dataset_info.json; None for data from a hub, tokenized earlier, or in the bundle."""
    directory = str(values["dataset_dir"])
    if values["dataset"] == generated_samples.GENERATED:
        return None
    if directory == "ONLINE" or directory.startswith("REMOTE:") or values.get("tokenized_path"):
        return None
    return directory


def usual_warnings(spec: Spec) -> Iterator[str]:
    """Warn about valid settings that may surprise the user, with any engine."""
    job = spec.job
    if job.dataset is not None and any(name.strip().endswith((".json", ".jsonl")) for name in job.dataset.split(",")):
        yield (
            f"the trainer does not accept files as data sets: add {job.dataset} to dataset_info.json, as the bundle's"
            " README.md shows"
        )
    if job.template is not None and (missing := missing_template(job.template)):
        yield missing
    yield from slow_precision(spec)
