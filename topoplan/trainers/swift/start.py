"""The end of a node's script: train.yaml as arguments, and one torchrun.

`swift sft FILE.yaml` (swift/cli/main.py) turns the keys of a YAML into arguments, and starts either torchrun, where
NPROC_PER_NODE or NNODES is set, or one more Python for each rank: `torchrun --no_python swift sft` starts every rank
twice, and a torchrun in each of them where one of the two is set. Neither passes signals on, or tells how a rank
ended. The modules that it starts take arguments alone, no YAML.
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
"""Stage -> what `swift STAGE` and `megatron STAGE` start (ROUTE_MAPPING)."""
_FILES = {"deepspeed": ("deepspeed", DEEPSPEED_FILE), "fsdp2": ("fsdp", FSDP_FILE)}
"""Backend -> the option, and the file that says how to shard."""


def start(spec: Spec, layout: Layout, node: int) -> str:
    """Bash, from a comment to `exec`; the file that says how to shard is named by its whole path."""
    option, file = _FILES.get(layout.backend, ("", ""))
    return _text(spec, node, _MODULE[spec.job.stage], option=option, file=file, megatron=False)


def start_megatron(spec: Spec, layout: Layout, node: int) -> str:
    """The same of `megatron sft`."""
    return _text(spec, node, _MEGATRON_MODULE[spec.job.stage], option="", file="", megatron=True)


def _text(spec: Spec, node: int, module: str, **context: str | bool) -> str:
    context |= {"samples": samples_argument(spec), "stage": spec.job.stage, "adapters": spec.job.finetuning == "lora"}
    return render("swift/start.sh.j2", context) + torchrun_command(spec, node, f'-m {module} "${{arguments[@]}}"')
