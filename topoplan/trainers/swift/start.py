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
from topoplan.trainers.templating import render
from topoplan.trainers.torchrun import torchrun_command

_MODULES = {
    ("sft", False): "swift.cli.sft",
    ("pt", False): "swift.cli.pt",
    ("sft", True): "swift.cli._megatron.sft",
    ("pt", True): "swift.cli._megatron.pt",
}
"""(stage, with Megatron) -> what `swift STAGE` and `megatron STAGE` start (ROUTE_MAPPING)."""


def start(spec: Spec, layout: Layout, node: int) -> str:
    """Bash, from a comment to `exec`; the file that says how to shard is named by its whole path."""
    option, file = {"deepspeed": ("deepspeed", DEEPSPEED_FILE), "fsdp2": ("fsdp", FSDP_FILE)}.get(
        layout.backend, ("", "")
    )
    on_megatron = layout.backend in ("megatron", "mca")
    module = _MODULES[spec.job.stage, on_megatron]
    context = {
        "stage": spec.job.stage,
        "option": option,
        "file": file,
        "megatron": on_megatron,
        "adapters": spec.job.finetuning == "lora",
    }
    return render("swift_start.sh.j2", context) + torchrun_command(spec, node, f'-m {module} "${{arguments[@]}}"')
