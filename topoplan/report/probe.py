"""Probe results of hosts, as a table with findings and as JSON (`topoplan.probe/1`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from topoplan.errors import HostError
from topoplan.hosts.cluster_yaml import SpecDraft
from topoplan.hosts.differences import gpu_names, memory_of
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.probe import Probed, network_of, socket_interface
from topoplan.hosts.result import Result
from topoplan.report.tables import apart, bullets, paragraph, table_of
from topoplan.report.text import counted
from topoplan.units import format_bit_rate, format_byte_rate, format_gib

SCHEMA = "topoplan.probe/1"


def probe_to_dict(
    reached: Sequence[Probed], failed: Mapping[str, HostError], draft: SpecDraft | None, written: str | None
) -> dict[str, Any]:
    """Return everything found. Sizes are in bytes, rates in bytes per second, one way."""
    return {
        "schema": SCHEMA,
        "hosts": [
            {"name": one.name, "address": one.host.address, "hostname": one.hostname, "facts": _facts(one.facts)}
            for one in reached
        ],
        "failed": [
            {"name": name, "problem": error.problem, "what": error.what, "remedy": error.remedy}
            for name, error in failed.items()
        ],
        "findings": [asdict(check) for check in draft.findings] if draft else [],
        "spec": draft.text if draft else None,
        "complete": draft is not None and draft.text is not None and draft.is_complete,
        "written": written,
    }


def _facts(facts: HostFacts) -> dict[str, Any]:
    view = asdict(facts)
    # JSON has neither sets nor tuples as keys.
    if facts.listening_ports is not None:
        view["listening_ports"] = sorted(facts.listening_ports)
    if facts.topology is not None:
        view["topology"] = [[one, other, link] for (one, other), link in sorted(facts.topology.items())]
    return view


def print_probe(
    console: Console,
    reached: Sequence[Probed],
    failed: Mapping[str, HostError],
    draft: SpecDraft | None,
    *,
    written: str | None,
) -> None:
    """Print a row per host, what is wrong or differs, and what to do next."""
    if reached:
        table = table_of("host", "GPUs", right=("memory", "NVLink"), last=("network", "interface", "driver", "torch"))
        for one in reached:
            table.add_row(*_row(one, reached))
        console.print(table)
    if failed:
        apart(console, f"{counted(len(failed), 'host')} could not be probed:", style="bold")
        bullets(console, (str(error) for error in failed.values()))
    findings = draft.findings if draft else ()
    if findings:
        apart(console, counted(len(findings), "finding") + ":", style="bold")
        bullets(console, (finding_line(check) for check in findings))
    console.print()
    if draft is None or draft.text is None:
        why = (
            "No spec was made" if draft is None or any(c.outcome == "failure" for c in findings) else "Nothing to write"
        )
        paragraph(console, f"{why}: {_why_none(reached, failed, draft)}.")
    elif written is not None:
        console.print(f"Wrote {written}", soft_wrap=True)
        if draft.is_complete:
            paragraph(console, f"Next: topoplan rank {written} --model NAME --job FILE")
        else:
            paragraph(console, "Next: fill in what is marked `not known`, then topoplan rank it")


def finding_line(check: Result) -> str:
    """Return `node3: no GPUs: nvidia-smi: not installed; install the driver`."""
    head = f"{check.host}: {check.what}" if check.host else check.what
    head = f"{head} [stops]" if check.outcome == "failure" else head
    return f"{head}; {check.remedy}" if check.remedy else head


def _why_none(reached: Sequence[Probed], failed: Mapping[str, HostError], draft: SpecDraft | None) -> str:
    if failed and (draft is None or not reached):
        some = f"{len(failed)} of {len(failed) + len(reached)} hosts could not be probed"
        return f"{some}; --partial makes one of the others" if reached else some
    return "the findings marked [stops] must go first"


def _row(one: Probed, hosts: Sequence[Probed]) -> list[str]:
    facts, network = one.facts, network_of(one, hosts)
    gpus = facts.gpus or ()
    sizes = sorted({gpu.memory_bytes for gpu in gpus if gpu.memory_bytes})
    nvlink = sorted({gpu.nvlink_bytes_per_s for gpu in gpus if gpu.nvlink_bytes_per_s})
    rate = f" {format_bit_rate(network.rate_bytes_per_s)}" if network.rate_bytes_per_s else ""
    main = memory_of(facts)
    return [
        one.name,
        f"{len(gpus)} x {gpu_names(facts)}" if gpus else "none",
        f"{sizes[0] // 2**20}MiB" if sizes else (format_gib(main) + " RAM" if main else "?"),
        format_byte_rate(2 * nvlink[0]) if nvlink else "-",
        f"{len(network.adapters)} x {network.kind}{rate}" if network.adapters else f"ethernet{rate}",
        socket_interface(one, hosts)[0] or "?",
        facts.versions.get("driver", "-"),
        facts.versions.get("torch", "-"),
    ]
