"""Hosts that answer every verb with terminal control sequences, and what reaches the terminal."""

import json
import shlex
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.bed.bed import Bed, probe
from tests.bed.ready_hosts import NAMES, ready_hosts, spec_of
from tests.cli.conftest import Cli, Result
from topoplan.run import record

EVIL = (
    b"\x1b[2J\x1b[31;8mhidden\x1b]0;title\x07\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\\x1b]52;c;ZXZpbA==\x07"
    b"\x1bP+q544e\x1b\\\x1b_Gi=1;AAAA\x1b\\\x1bc\x05\xc2\x9b2J\xc2\x9d0;t\xc2\x9c\x9b2J ok\rfake\b\b\x7f"
    b"\xe2\x80\xaegnp.exe\xe2\x81\xa6 [bold red]mark[/bold red] :skull: \xe2\x80\xa8line\x0bx\x00"
)


def echo(text: bytes) -> str:
    """Return a shell command that prints `text`."""
    return "printf '{}'".format("".join(f"\\{byte:03o}" for byte in text))


ECHO = echo(EVIL)
ON_A_LINE = EVIL.replace(b"\xe2\x80\xa8line\x0bx\x00", b"").replace(b"\r", b"")
SMI = f"""\
#!/bin/sh
evil="$({echo(ON_A_LINE)})"
case "$*" in
*--query-gpu*)
    echo 'index, name, uuid, memory.total [MiB], memory.used [MiB], pci.bus_id, driver_version'
    for card in 0 1; do
        uuid="GPU-$(hostname)-$card" bus="00000000:1$card:00.0"
        printf '%s\\n' "$card, NVIDIA H100 80GB HBM3$evil, $uuid, 81559 MiB, 4 MiB, $bus, 550$evil"
    done ;;
*--query-compute-apps*)
    printf '%s\\n' 'pid, gpu_uuid, used_gpu_memory [MiB], process_name' "1, GPU-$(hostname)-0, 9000 MiB, python$evil" ;;
*) echo "$evil"; exit 1 ;;
esac
"""


def assert_harmless(shown: Result) -> None:
    for text in (shown.out, shown.err):
        odd = {one for one in text if not one.isprintable()} - {"\n"}
        assert not odd, (odd, text)


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bed, Path]]:
    """Provide hosts whose logins, GPUs and packages contain control sequences."""
    if probe()[0] != "namespaces":
        pytest.skip(f"no network namespaces here: {probe()[1]}")
    directory = tmp_path_factory.mktemp("evil")
    with ready_hosts(directory) as bed:
        for name in NAMES:
            home = directory / name
            (home / "home" / ".bashrc").write_text(f"{ECHO}; echo; {ECHO} >&2; echo >&2\n")
            (home / "bin" / "nvidia-smi").write_text(SMI)
            (site,) = (home / "venv" / "lib").glob("python3*/site-packages")
            meta = site / "torch-2.6.0.dist-info" / "METADATA"
            meta.write_bytes(
                meta.read_bytes().replace(b"2.6.0", b"2.6.0" + name.encode() + ON_A_LINE.replace(b"\x9b2J ok", b""))
            )
        yield bed, directory


@contextmanager
def tool(directory: Path, program: str) -> Iterator[None]:
    """Replace a tool on host n1 by one that prints control sequences and fails."""
    file = directory / "n1" / "bin" / program
    file.write_text(f"#!/bin/sh\n{ECHO} >&2\necho >&2\n{ECHO}\nexit 1\n")
    file.chmod(0o755)
    try:
        yield
    finally:
        file.unlink()


@pytest.fixture
def bundle(evil: tuple[Bed, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Path:
    bed, directory = evil
    monkeypatch.setenv("HOME", str(bed.home))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    spec_of(bed, directory)
    spec = directory / "cluster.yaml"
    made = cli("generate", spec, "--pin", "tp=2,pp=1,micro_batch_size=1", "-o", tmp_path / "bundle")
    assert made.code == 0, made.err
    for script in (tmp_path / "bundle").glob("node-*.sh"):
        script.write_text(f"{ECHO}\necho\n{ECHO} >&2\nexit 3\n")
    return tmp_path / "bundle"


def test_what_hosts_say_of_themselves(evil: tuple[Bed, Path], bundle: Path, cli: Cli, tmp_path: Path) -> None:
    bed, directory = evil
    hosts = [f"{host.address}:{host.port}" for host in bed.hosts.values()]
    for arguments in (
        ["probe", *hosts, "--venv", directory / "n0" / "venv"],
        ["probe", *hosts, "-o", tmp_path / "cluster.yaml"],
        ["preflight", bundle],
        ["preflight", directory / "cluster.yaml"],
        ["launch", bundle],
    ):
        shown = cli(*arguments)
        assert_harmless(shown)
        assert "bold red]" in shown.out + shown.err, shown
    document = json.loads(cli("preflight", bundle, "--json").out)
    assert "versions" in {one["name"] for one in document["checks"] if one["outcome"] == "failure"}
    bashrc = directory / "n1" / "home" / ".bashrc"
    good = bashrc.read_text()
    try:
        bashrc.write_text(f"{ECHO} >&2; exit 3\n")
        shown = cli("probe", *hosts)
    finally:
        bashrc.write_text(good)
    assert_harmless(shown)
    assert "it did not run topoplan's script" in shown.err


def test_jobs_and_their_end(evil: tuple[Bed, Path], bundle: Path, cli: Cli) -> None:
    _, directory = evil
    for program, step in (("sha256sum", "files could not be put"), ("setsid", "the job was not started")):
        with tool(directory, program):
            shown = cli("launch", bundle, "--no-preflight")
        assert (shown.code, step in shown.err) == (1, True), shown.err
        assert_harmless(shown)
    shown = cli("launch", bundle, "--no-preflight", "--grace", "1")
    assert shown.code == 3, shown
    assert "failed first: ended with exit code 3" in shown.err
    assert "] fake" in shown.out
    assert_harmless(shown)
    for verb in (["status"], ["logs"], ["logs", "-f"], ["logs", "--node", "1"], ["attach"], ["stop"], ["runs"]):
        assert_harmless(cli(*verb))
    with tool(directory, "wc"):
        shown = cli("status")
    assert_harmless(shown)
    with tool(directory, "awk"):
        assert_harmless(cli("stop"))
    for kept in record.load().directory().glob("*.log"):
        assert EVIL[:20] in kept.read_bytes()  # the copy equals the log, byte for byte


def test_a_server_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(EVIL + b"\n" + EVIL + b"\n")

    monkeypatch.setenv("HOME", str(tmp_path))
    with socketserver.TCPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        shown = cli("probe", shlex.quote(f"127.0.0.1:{server.server_address[1]}"))
        server.shutdown()
    assert_harmless(shown)
    assert "is not an SSH server" in shown.err
