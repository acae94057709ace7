"""Hosts as `topoplan probe` and `topoplan preflight` find them: as JSON and as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from topoplan.errors import HostError
from topoplan.hosts.cluster_yaml import SpecDraft
from topoplan.hosts.differences import gpu_names, memory_of
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.preflight.checks import REACHABLE
from topoplan.hosts.probe import Probed, network_of, socket_interface
from topoplan.hosts.result import Outcome, Result
from topoplan.report.tables import apart, bullets, paragraph, table_of
from topoplan.report.text import counted
from topoplan.units import format_bit_rate, format_byte_rate, format_gib, named


def probe_to_dict(
    reached: Sequence[Probed], failed: Mapping[str, HostError], draft: SpecDraft | None, written: str | None
) -> dict[str, Any]:
    """Return everything found. Sizes are in bytes, rates in bytes per second, one way."""
    return {
        "schema": "topoplan.probe/1",
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


_ORDER: tuple[Outcome, ...] = ("failure", "warning", "skipped", "ok")
_WORDS: dict[Outcome | None, str] = {"ok": "ok", "warning": "warning", "failure": "FAILURE", "skipped": "skipped"}
_SIGNS: dict[Outcome | None, str] = {"ok": ".", "warning": "!", "failure": "X", "skipped": "-"}
_STYLES: dict[Outcome | None, str] = {"warning": "yellow", "failure": "bold red", "skipped": "dim"}
_NOT_LOOKED_AT = " "
_MOST_NAMED = 6
_LABEL = 18


def worst(checks: Sequence[Result]) -> Outcome:
    """Return the overall outcome of the checks; skipped ones do not count."""
    found = {check.outcome for check in checks}
    return "failure" if "failure" in found else "warning" if "warning" in found else "ok"


def preflight_to_dict(cluster: str, hosts: Sequence[str], checks: Sequence[Result]) -> dict[str, Any]:
    """Return every check of every host."""
    return {
        "schema": "topoplan.preflight/1",
        "cluster": cluster,
        "outcome": worst(checks),
        "counts": {outcome: sum(check.outcome == outcome for check in checks) for outcome in _ORDER},
        "hosts": list(hosts),
        "checks": [asdict(check) for check in checks],
    }


def print_preflight(console: Console, cluster: str, hosts: Sequence[str], checks: Sequence[Result]) -> None:
    """Print checks that are not ok everywhere, host by host, then findings with remedies, then the passed checks."""
    names = list(dict.fromkeys(check.name for check in checks))
    by_place = {(check.name, check.host): check.outcome for check in checks}
    uneven = [name for name in names if any(by_place.get((name, host), "ok") != "ok" for host in hosts)]
    # Checks of no particular host are not in the matrix.
    fine = [name for name in names if name not in uneven and by_place.get((name, ""), "ok") == "ok"]
    paragraph(console, f"{cluster}, {counted(len(hosts), 'host')}: {_summary(checks)}.", style="bold")
    if uneven:
        apart(console, _matrix(console.width, hosts, uneven, by_place))
    for title, outcome in (("Failures", "failure"), ("Warnings", "warning"), ("Not checked", "skipped")):
        if found := [check for check in checks if check.outcome == outcome]:
            apart(console, f"{title}:", style="bold")
            bullets(console, _findings(found, hosts))
    if fine:
        apart(console, f"Ok{_where_ok(hosts, checks)}: {', '.join(fine)}.", style="dim")


def _where_ok(hosts: Sequence[str], checks: Sequence[Result]) -> str:
    """Return ` on all hosts`, or on how many if some did not answer: those were not checked for anything else."""
    silent = {check.host for check in checks if check.name == REACHABLE and check.outcome == "failure"}
    answered = len(set(hosts) - silent)
    if answered == len(hosts):
        return " on all hosts"
    those = "one host" if answered == 1 else f"{answered} hosts"
    return f" on the {those} that answered" if answered else ""


def _summary(checks: Sequence[Result]) -> str:
    counts = {outcome: sum(check.outcome == outcome for check in checks) for outcome in _ORDER}
    parts = [counted(counts[outcome], outcome) for outcome in ("failure", "warning") if counts[outcome]]
    parts = parts or ["ready"]
    return ", ".join([*parts, f"{counts['skipped']} not checked"] if counts["skipped"] else parts)


def _matrix(
    width: int, hosts: Sequence[str], names: Sequence[str], by_place: dict[tuple[str, str], Outcome]
) -> Table | Text:
    """Return a table of outcomes if it fits the width, otherwise one sign per host."""
    room = sum(max(len(host), len(_WORDS["failure"])) + 1 for host in hosts) + max(map(len, names)) + 1
    if room <= width:
        table = table_of("", *hosts)
        for name in names:
            cells = [by_place.get((name, host)) for host in hosts]
            table.add_row(name, *(Text(_WORDS.get(cell, ""), style=_STYLES.get(cell, "")) for cell in cells))
        return table
    return _signs(width, hosts, names, by_place)


def _signs(width: int, hosts: Sequence[str], names: Sequence[str], by_place: dict[tuple[str, str], Outcome]) -> Text:
    """Return one column per host, in blocks of ten under the number of the first, on as many lines as needed."""
    a_line = max(10, (width - _LABEL) // 11 * 10)
    text = Text()
    for first in range(0, len(hosts), a_line):
        part = hosts[first : first + a_line]
        ruler = "".join(f"{first + ten:<11}" for ten in range(0, len(part), 10))
        text.append(f"{'node':<{_LABEL}}{ruler.rstrip()}\n", style="dim")
        for name in names:
            text.append(f"{name:<{_LABEL}}")
            for place, host in enumerate(part):
                outcome = by_place.get((name, host))
                gap = " " if place and place % 10 == 0 else ""
                text.append(gap + _SIGNS.get(outcome, _NOT_LOOKED_AT), style=_STYLES.get(outcome, ""))
            text.append("\n")
    text.append("X failure, ! warning, - not checked, . ok", style="dim")
    return text


def _findings(checks: Sequence[Result], hosts: Sequence[str]) -> list[str]:
    places: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for check in checks:
        places[check.name, check.what, check.remedy].append(check.host)
    return [
        ": ".join(filter(None, (name, _hosts(on, hosts), f"{what}; {remedy}" if remedy else what)))
        for (name, what, remedy), on in places.items()
    ]


def _hosts(on: Sequence[str], hosts: Sequence[str]) -> str:
    if len(on) == len(hosts) > 1:
        return f"all {len(hosts)} hosts"
    return named(on, _MOST_NAMED)
