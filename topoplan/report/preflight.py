"""Preflight results, as JSON (`topoplan.preflight/1`) and as text: hosts by checks, findings with remedies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from topoplan.hosts.result import Outcome, Result
from topoplan.report.tables import apart, bullets, paragraph, table_of
from topoplan.report.text import counted
from topoplan.units import named

SCHEMA = "topoplan.preflight/1"

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
        "schema": SCHEMA,
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
        apart(console, f"Ok on all hosts: {', '.join(fine)}.", style="dim")


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
    """Return one text per finding, naming all hosts that have it."""
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
