"""Hypothesis looks for new examples on a developer's machine and repeats the same ones in CI. At the end, a line says
what the SSH tests ran on."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from topoplan.specs.cluster import Cluster

pytest_plugins = ["tests.bed.fixtures"]

WITH_SSH = ("tests/bed/", "tests/remote/", "tests/run/")
ON_HOSTS = {
    *("run/test_launch", "test_launch_faults", "test_launch_for_real", "test_node", "test_connection"),
    *("remote/test_fanout", "remote/test_identities", "remote/test_ssh", "remote/test_upload", "remote/test_wire"),
    "preflight/test_preflight",
    *("hosts/test_measure", "hosts/test_probe", "test_collect"),
    *("run/test_tune", "test_torchrun_for_real", "test_watch", "test_stopping", "run/test_attach"),
    *("test_supervise", "test_attempts", "run/test_programs", "test_stop_program"),
    *("cli/test_runs", "test_hostile_hosts"),
}
"""Modules, each with its room, that log in to hosts or start complete launches, jobs and torchruns, and mostly wait for
them: marked `hosts`."""

# Restore signals ignored by a background shell or nohup, which programs started by tests would otherwise inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("dev", deadline=None, max_examples=15)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Disable fsync: test files need not survive a loss of power, and a shared disk syncs slowly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_terminal() -> Iterator[None]:
    """Remove the terminal's width from the environment of workers, which would affect piped output."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_cached_searches() -> Iterator[None]:
    """Disable the cache of searches, so that every test searches for itself and the user's cache is untouched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", os.devnull)
        yield


@pytest.fixture(scope="session")
def h100s() -> "Cluster":
    """Return a shipped cluster: four machines with eight GPUs each."""
    return _shipped("h100-4x8")


@pytest.fixture(scope="session")
def a100s() -> "Cluster":
    """Return a shipped cluster: one machine with eight GPUs."""
    return _shipped("a100-1x8")


def _shipped(name: str) -> "Cluster":
    from topoplan.specs.load import load_cluster

    return load_cluster(str(Path(__file__).parents[1] / "cluster_specs" / f"{name}.yaml"))


def _names(path: Path) -> set[str]:
    return {path.stem, f"{path.parent.name}/{path.stem}"}


def _is_on_hosts(path: Path) -> bool:
    return bool(_names(path) & ON_HOSTS)


def pytest_configure() -> None:
    """Refuse a list that names no module any more: its tests would run as if they started nothing."""
    gone = ON_HOSTS.difference(*map(_names, Path(__file__).parent.rglob("test_*.py")))
    if gone:
        raise pytest.UsageError(f"ON_HOSTS names no module: {', '.join(sorted(gone))}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip test files that were not requested: importing them can take as long as running the requested ones."""
    asked = config.option.markexpr
    if not collection_path.match("test_*.py"):
        return None
    on_hosts = _is_on_hosts(collection_path)
    if asked == "hosts":
        return None if on_hosts else True
    # Tests in tests/verify import torch and transformers, and so do some tests on hosts.
    on_trainers = collection_path.parent.name == "verify"
    return True if (on_hosts and "not hosts" in asked) or (on_trainers and "not verify" in asked) else None


def pytest_collection_finish() -> None:
    """Exempt everything imported so far from garbage collection, which would cost a tenth of the run time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return more workers than cores, because tests spend most of their time waiting."""
    return (os.cpu_count() or 1) * 3 // 2 if config.option.markexpr == "hosts" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_on_hosts(item.path):
            item.add_marker("hosts")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = (report for reports in terminalreporter.stats.values() for report in reports)
    if any(getattr(report, "nodeid", "").startswith(WITH_SSH) for report in reports):
        from tests.bed.bed import probe

        kind, reason = probe()
        on = {"namespaces": "network namespaces", "loopback": "loopback addresses"}.get(kind or "", "nothing")
        terminalreporter.write_line(f"ssh tests ran on {on}{f' ({reason})' if reason else ''}")
