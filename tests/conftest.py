"""Hypothesis looks for new examples on a developer's machine and repeats the same ones in CI. At the end, a line says
what the SSH tests ran on."""

import os

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = (report for reports in terminalreporter.stats.values() for report in reports)
    if any(getattr(report, "nodeid", "").startswith("tests/launch/") for report in reports):
        from tests.launch.bed import probe

        kind, reason = probe()
        on = {"namespaces": "network namespaces", "loopback": "loopback addresses"}.get(kind or "", "nothing")
        terminalreporter.write_line(f"ssh tests ran on {on}{f' ({reason})' if reason else ''}")
