"""Ask in the terminal for what a spec needs; a wrong answer is rejected and asked for again."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import typer

from topoplan.catalog.fabrics import FabricKind
from topoplan.cli.options import SpecOptions
from topoplan.specs.job import FINETUNINGS, STAGES

if TYPE_CHECKING:
    from topoplan.specs.source import Source
    from topoplan.specs.spec import Spec

_PLACES = {"model": "Qwen/Qwen3-0.6B", "seq_len": "128", "batch": "1"}
"""Placeholders for answers that are still missing, so that the rest can be validated."""
_LINKS = {
    "nvlink_bandwidth": "NVLink of a GPU, both ways together (none: the GPUs talk over PCIe)",
    "ib_bandwidth": "Network of one NIC, each way",
    "nics_per_node": "NICs in each",
}


def answered(options: SpecOptions, base: Source | None, *, asks_job: bool) -> SpecOptions:
    """Return the options completed by the user's answers. `base` holds the cluster, if it is known.

    Raises typer's Abort at the end of the input, or for Ctrl-C.
    """
    asker = _Asker(options, base)
    if base is None:
        from topoplan.catalog import gpu_names
        from topoplan.cli.output import stdout_console
        from topoplan.report.tables import paragraph

        console = stdout_console()
        console.file = sys.stderr
        paragraph(console, f"Known GPUs: {', '.join(gpu_names())}. Short names such as h100 and 4090 will do.")
        paragraph(console, "Enter takes what stands in brackets.")
        asker.option("gpu", "GPU")
        asker.option("nodes", "Machines", "1")
        asker.option("gpus_per_node", "GPUs in each", str(asker.spec().cluster.gpus_per_node))
        asker.links()
    if asks_job:
        asker.option("model", "Model (a name of `topoplan show models`, or a directory with config.json)")
        asker.key("stage", f"Stage ({', '.join(STAGES)})", "sft")
        asker.option("finetuning", f"Fine-tuning ({', '.join(FINETUNINGS)})", "full")
        asker.option("seq_len", "Tokens in a sequence", "4096")
        asker.option("batch", "Sequences in a step, over all GPUs", "64")
        asker.key("dataset", "Data set (a name in dataset_info.json, or a .json file; may be left open)", "")
        asker.key("samples", "Samples in it (gives the hours; may be left open)", "")
    return asker.options


@dataclass
class _Asker:
    options: SpecOptions
    base: Source | None

    def spec(self, **answer: Any) -> Spec:
        """Return the spec of all answers so far plus another one."""
        options = replace(self.options, **answer)
        said = self.base.data if self.base else {}
        open_: dict[str, Any] = {
            name: place
            for name, place in _PLACES.items()
            if getattr(options, name) is None and ("model" if name == "model" else "job") not in said
        }
        return replace(options, job=None, **open_).read(self.base)

    def option(self, name: str, words: str, usual: str | None = None) -> None:
        """Ask for an option that is not given."""
        if getattr(self.options, name) is None:
            answer: Any = self._ask(words, usual, lambda text: {name: text})
            self.options = replace(self.options, **{name: answer})

    def key(self, key: str, words: str, usual: str) -> None:
        """Ask for a key without an option of its own; the default answer is not recorded."""
        given = self.options.overrides or []
        if any(text.partition("=")[0].removeprefix("job.") == key for text in given):
            return
        text = self._ask(words, usual, lambda text: {"overrides": [*given, f"{key}={text}"] if text else given})
        if text != usual:
            self.options = replace(self.options, overrides=[*given, f"{key}={text}"])

    def links(self) -> None:
        """Ask for the values that would be taken from the GPU's usual machine."""
        from topoplan.specs.written import assumed_keys

        cluster = self.spec().cluster
        for key, value in assumed_keys(cluster).items():
            self.key(key, _LINKS[key], str(value))
        if cluster.nodes > 1:
            self.key("fabric.kind", f"Kind of network ({', '.join(get_args(FabricKind))})", "infiniband")

    def _ask(self, words: str, usual: str | None, change: Any) -> str:
        from topoplan.errors import InputError

        def checked(text: str) -> str:
            try:
                self.spec(**change(text.strip()))
            except InputError as error:
                raise typer.BadParameter("; ".join(filter(None, (error.what, error.expected, error.remedy)))) from None
            return text.strip()

        answer: str = typer.prompt(words, default=usual, show_default=usual != "", err=True, value_proc=checked)
        return answer
