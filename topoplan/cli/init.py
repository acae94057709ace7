"""`topoplan init`: write a spec, from answers, options, hosts, or the files of an existing job."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import join, quote
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from topoplan.cli.options import EXAMPLE, WITHOUT_SPEC, SpecOptions, missing, not_both, option
from topoplan.cli.output import print_written, stdout_console
from topoplan.cli.probe import HostsFile, Machines, Venv, Workdir
from topoplan.cli.ssh_options import AcceptNew
from topoplan.errors import InputError, OutputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from topoplan.specs.cluster import Host
    from topoplan.specs.source import Source
    from topoplan.specs.spec import Spec


_STDOUT = "-"


def init(
    hosts: Machines = None,
    from_file: Annotated[
        str | None,
        option(
            "--from FILE",
            "A train.yaml of LLaMA-Factory's, a launch script such as ms-swift's, or a bundle's directory.",
        ),
    ] = None,
    from_hosts: Annotated[
        bool, option("--from-hosts", "Ask the machines HOST... what they are, as `topoplan probe` does.")
    ] = False,
    hosts_file: HostsFile = None,
    workdir: Workdir = None,
    venv: Venv = None,
    *,
    options: Annotated[SpecOptions, (*WITHOUT_SPEC, "overrides", "pin", "margin")],
    output: Annotated[str, option("--output -o FILE", "Where to write; - is standard output.")] = "cluster.yaml",
    force: Annotated[bool, option("--force", "Overwrite a file that is there.")] = False,
    accept_new: AcceptNew = False,
) -> None:
    """Asks in the terminal for whatever the options and files leave open.

    Exit code 1: a host could not be queried, or the hosts make no cluster; 2: bad input, or a file is in the way.
    """
    from topoplan.cli.host_words import hosts_of

    not_both("--from", from_file, "--job", options.job)
    not_both("--from", from_file, "--from-hosts", from_hosts)
    if not from_hosts and any((hosts, hosts_file, workdir, venv)):
        raise InputError("hosts are asked with --from-hosts alone", remedy="write --from-hosts node0 node1")
    _refuse_to_overwrite(output, force)
    if from_hosts:
        chosen = hosts_of(hosts or (), hosts_file, workdir=workdir, venv=venv)
        begun = _of_hosts(chosen, options, accept_new=accept_new)
    else:
        begun = _begun(from_file, options)
    # Prompts must not end up in the output.
    with redirect_stdout(sys.stderr) if output == _STDOUT else nullcontext():
        begun = replace(begun, options=_whole(begun))
    spec = begun.options.read(begun.base)
    text = begun.text(spec, begun.options.assumed_of_job(begun.base))
    if output == _STDOUT:
        sys.stdout.write(text)
        return
    from topoplan.bundle.write import write_file

    write_file(output, text, mark="", writer="topoplan init", force=True)
    _tell(spec, output)


@dataclass(frozen=True, slots=True)
class _Begun:
    """What is known before anything is asked."""

    options: SpecOptions
    base: Source | None
    """The cluster, and perhaps model and job."""
    text: Callable[[Spec, list[str]], str]
    """Returns the file's text for a spec, with sentences on where its job comes from."""

    @property
    def lacks(self) -> list[str]:
        """Options that must be given or asked for."""
        said = self.base.data if self.base else {}
        needed = {} if self.base else {"--gpu": self.options.gpu}
        if not self.options.job:
            needed |= {} if "model" in said else {"--model": self.options.model}
            needed |= {} if "job" in said else {"--seq-len": self.options.seq_len, "--batch": self.options.batch}
        return [option for option, value in needed.items() if value is None]


def _begun(from_file: str | None, options: SpecOptions) -> _Begun:
    from topoplan.report.spec_text import spec_text
    from topoplan.specs.source import parse_source

    if from_file is None:
        return _Begun(options, None, spec_text)
    from topoplan.bundle.plan_file import bundle_of, read_plan_file

    if from_file and bundle_of(from_file) is not None:
        recorded = read_plan_file(from_file)
        # The inputs in plan.json do not say for which trainer the plan was made.
        spec = replace(recorded.spec, trainer=recorded.plan.trainer)
        return _Begun(options, parse_source(spec_text(spec), name=from_file), spec_text)
    return _of_file(from_file, options)


def _of_file(path: str, options: SpecOptions) -> _Begun:
    """Take a trainer's file as the job, with the numbers of nodes and GPUs that its command starts."""
    from topoplan.lint.job_file import trainer_file
    from topoplan.report.spec_text import spec_text
    from topoplan.specs.source import read_source

    file = trainer_file(path)
    options = replace(options, job=path)
    if file is None and "gpu" in read_source(Path(path)).data:
        raise InputError("is a spec already", where=path, remedy=f"`topoplan rank {quote(path)}` takes it as it is")
    starts = file.processes if file else None
    if starts and starts.nodes and not options.gives("nodes"):
        options = replace(options, nodes=str(starts.nodes))
    if starts and starts.gpus_per_node and options.gpus_per_node is None:
        options = replace(options, gpus_per_node=str(starts.gpus_per_node))
    return _Begun(options, None, spec_text)


def _of_hosts(hosts: list[Host], options: SpecOptions, *, accept_new: bool) -> _Begun:
    """Query the machines for their cluster. If that fails, prints the reason and raises typer.Exit."""
    from topoplan.cli.probe import ask
    from topoplan.hosts.cluster_yaml import cluster_spec
    from topoplan.report.hosts import print_probe
    from topoplan.report.spec_text import job_text
    from topoplan.specs.load import load_cluster
    from topoplan.specs.source import parse_source
    from topoplan.specs.written import cluster_keys

    if said := [name for name in ("gpu", "nodes", "gpus_per_node") if getattr(options, name) is not None]:
        option = f"--{said[0].replace('_', '-')}"
        raise InputError("the hosts say it", where=option, remedy=f"leave {option} or --from-hosts out")
    asked = ask(hosts, accept_new=accept_new)
    draft = cluster_spec(asked.reached) if asked.reached and not asked.failed else None
    console = stdout_console()
    console.file = sys.stderr
    print_probe(console, asked.reached, asked.failed, draft, written=None)
    if draft is None or draft.text is None:
        raise typer.Exit(1)
    if not draft.is_complete:
        remedy = f"`topoplan probe {' '.join(one.address for one in hosts)} -o FILE` writes a spec to fill in"
        raise InputError("the catalog does not have this GPU", where="--from-hosts", remedy=remedy)

    def text(spec: Spec, notes: list[str]) -> str:
        written = cluster_spec(asked.reached, below=job_text(spec, notes)).text or ""
        if cluster_keys(load_cluster(parse_source(written, name="the hosts"))) != cluster_keys(spec.cluster):
            remedy = "leave it out, and correct what is written"
            raise InputError("an option changes the cluster, which the hosts say", where="--from-hosts", remedy=remedy)
        return written

    return _Begun(options, parse_source(draft.text, name="the hosts"), text)


def _whole(begun: _Begun) -> SpecOptions:
    lacks = begun.lacks
    if not lacks:
        return begun.options
    if not sys.stdin.isatty():
        words = EXAMPLE.split()
        example = " ".join(f"{option} {words[words.index(option) + 1]}" for option in lacks)
        remedy = f"add {example}, or call it in a terminal, where it asks"
        raise InputError(missing(lacks), remedy=remedy)

    return answered(begun.options, begun.base, asks_job=not begun.options.job)


def _refuse_to_overwrite(output: str, force: bool) -> None:
    from topoplan.bundle.write import is_stream, refuse_no_file

    if output == _STDOUT:
        return
    refuse_no_file(output)
    if not force and os.path.lexists(output) and not is_stream(Path(output)):
        raise OutputError("exists", where=output, remedy="name another with -o, or overwrite it with --force")


def _tell(spec: Spec, output: str) -> None:
    from topoplan.planner.oddities import machine_note
    from topoplan.report.tables import paragraph
    from topoplan.report.text import spec_line

    console = stdout_console()
    paragraph(console, f"{spec_line(spec)}.", style="bold")
    if note := machine_note(spec.cluster):
        paragraph(console, f"{note[0].upper()}{note[1:]}.")
    print_written(output)
    console.print()
    console.print(f"Next  {join(['topoplan', 'rank', output])}", soft_wrap=True)


_PLACES = {"model": "Qwen/Qwen3-0.6B", "seq_len": "128", "batch": "1"}
"""Placeholders for answers that are still missing, so that the rest can be validated."""
_LINKS = {
    "nvlink_bandwidth": "NVLink of a GPU, both ways together (none: the GPUs talk over PCIe)",
    "ib_bandwidth": "Network of one NIC, each way",
    "nics_per_node": "NICs in each",
}


def answered(options: SpecOptions, base: Source | None, *, asks_job: bool) -> SpecOptions:
    """Return the options completed by the user's answers. `base` holds the cluster, if it is known. Raises typer's
    Abort at the end of the input, or for Ctrl-C."""
    from topoplan.specs.job import FINETUNINGS, STAGES

    asker = _Asker(options, base)
    if base is None:
        from topoplan.catalog import gpu_names
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
            if not options.gives(name) and ("model" if name == "model" else "job") not in said
        }
        return replace(options, job=None, **open_).read(self.base)

    def option(self, name: str, words: str, usual: str | None = None) -> None:
        """Ask for an option that is not given."""
        if not self.options.gives(name):
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
        from topoplan.catalog.fabrics import FabricKind
        from topoplan.specs.written import assumed_keys

        cluster = self.spec().cluster
        for key, value in assumed_keys(cluster).items():
            self.key(key, _LINKS[key], str(value))
        if cluster.nodes > 1:
            self.key("fabric.kind", f"Kind of network ({', '.join(get_args(FabricKind))})", "infiniband")

    def _ask(self, words: str, usual: str | None, change: Any) -> str:
        def checked(text: str) -> str:
            try:
                self.spec(**change(text.strip()))
            except InputError as error:
                raise typer.BadParameter("; ".join(filter(None, (error.what, error.expected, error.remedy)))) from None
            return text.strip()

        answer: str = typer.prompt(words, default=usual, show_default=usual != "", err=True, value_proc=checked)
        return answer
