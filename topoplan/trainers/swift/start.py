"""The end of a node's script: train.yaml converted to arguments, and one torchrun.

`swift sft FILE.yaml` (swift/cli/main.py) converts a YAML file's keys to arguments. It then starts torchrun if
NPROC_PER_NODE or NNODES is set, or else one more Python process per rank. `torchrun --no_python swift sft` therefore
starts every rank twice, or a torchrun in each rank if one of the two is set. Neither forwards signals nor reports how a
rank ended. The modules that it starts accept arguments only, no YAML.
"""

from __future__ import annotations

from topoplan.layout.layout import Layout
from topoplan.specs.spec import Spec
from topoplan.trainers.swift.sharding import DEEPSPEED_FILE, FSDP_FILE
from topoplan.trainers.swift.trial import samples_argument
from topoplan.trainers.templating import render
from topoplan.trainers.torchrun import torchrun_command

_MODULE = {"sft": "swift.cli.sft", "pt": "swift.cli.pt"}
_MEGATRON_MODULE = {"sft": "swift.cli._megatron.sft", "pt": "swift.cli._megatron.pt"}
"""Stage -> the module that `swift STAGE` or `megatron STAGE` starts (ROUTE_MAPPING)."""
_FILES = {"deepspeed": ("deepspeed", DEEPSPEED_FILE), "fsdp2": ("fsdp", FSDP_FILE)}
"""Backend -> the option and the file that configure sharding."""


def start(spec: Spec, layout: Layout, node: int) -> str:
    """Return bash code, from a comment to `exec`, in which the sharding file has its absolute path."""
    option, file = _FILES.get(layout.backend, ("", ""))
    return _text(spec, node, _MODULE[spec.job.stage], option=option, file=file, megatron=False)


def start_megatron(spec: Spec, layout: Layout, node: int) -> str:
    """Return bash code for `megatron sft`, from a comment to `exec`."""
    return _text(spec, node, _MEGATRON_MODULE[spec.job.stage], option="", file="", megatron=True)


def _text(spec: Spec, node: int, module: str, **context: str | bool) -> str:
    context |= {"samples": samples_argument(spec), "stage": spec.job.stage, "adapters": spec.job.finetuning == "lora"}
    return render("swift/start.sh.j2", context) + torchrun_command(spec, node, f'-m {module} "${{arguments[@]}}"')
