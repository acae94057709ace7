"""`topoplan probe` over real sshd, with stand-ins for nvidia-smi that print recordings."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.bed.bed import Bed
from tests.hosts.machines import stand_in
from topoplan.cli.main import main
from topoplan.hosts.probe import ProbeResults, probe_hosts
from topoplan.remote.identities import Access
from topoplan.specs.cluster import Host
from topoplan.specs.load import load_spec

Topoplan = Callable[..., tuple[int, str, str]]
JOB = "seq_len: 4096\nglobal_batch_size: 64\n"


@pytest.fixture
def machines(cables: Bed, tmp_path: Path) -> Iterator[Bed]:
    """alpha and beta with the GPUs of a PCIe machine; the others without any."""
    equip(cables, {"alpha": "rtx4090-pcie", "beta": "rtx4090-pcie"}, tmp_path)
    yield cables
    for name in ("alpha", "beta"):
        cables.restart(name)


def equip(bed: Bed, kinds: Mapping[str, str], directory: Path) -> None:
    for name, kind in kinds.items():
        tools = stand_in(directory / f"bin-{name}-{kind}", kind)
        path = f"SetEnv PATH={tools}:/usr/sbin:/usr/bin:/sbin:/bin HOME={bed[name].directory}/home"
        bed.restart(name, options=[path])


@pytest.fixture
def home(cables: Bed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with which `ssh alpha` works."""
    ssh = tmp_path / "home" / ".ssh"
    ssh.mkdir(parents=True)
    lines = [f"Host {one.name}\nHostName {one.address}\nPort {one.port}\n" for one in cables.hosts.values()]
    lines += [f"Host alias-*\nHostName {cables['beta'].address}\n", "Host gone\nHostName 127.0.0.1\nPort 9\n"]
    lines += [f"Host *\nUser {cables.user}\nIdentityFile {cables.key}\nIdentitiesOnly yes\n"]
    lines += [f"UserKnownHostsFile {cables.known_hosts}\n"]
    (ssh / "config").write_text("".join(lines))
    monkeypatch.setenv("HOME", str(ssh.parent))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return ssh.parent


@pytest.fixture
def topoplan(capsys: pytest.CaptureFixture[str], home: Path) -> Topoplan:
    """Run the program in this process; return its exit code and both outputs."""

    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return run


def asked(bed: Bed, *names: str, **changes: object) -> ProbeResults:
    targets = {name: bed.target(name, **changes) for name in names}
    return probe_hosts([Host(address=name) for name in names], targets, Access())


class TestAskHosts:
    def test_gives_the_facts_of_each_host(self, machines: Bed) -> None:
        found = asked(machines, "alpha", "beta")
        assert not found.failed
        alpha, beta = found.reached
        assert (alpha.facts.hostname, beta.facts.hostname) == ("alpha", "beta")
        assert len(alpha.facts.gpus or ()) == 8
        routes = {route.address: route for route in alpha.facts.routes}
        assert routes["beta"].resolved == (machines["beta"].address,)
        assert routes["beta"].interface == "eth0"
        assert not alpha.facts.missing.keys() & {"end", "gpus", "memory_bytes"}

    def test_names_a_host_that_fails_and_asks_the_others(self, machines: Bed) -> None:
        targets = {"alpha": machines.target("alpha"), "deaf": machines.target("beta", name="deaf", port=9)}
        found = probe_hosts([Host(address="alpha"), Host(address="deaf")], targets, Access())
        assert [one.name for one in found.reached] == ["alpha"]
        assert found.failed["deaf"].problem == "refused"

    def test_says_when_a_host_runs_no_script(self, cables: Bed) -> None:
        with cables.restarted("alpha", "ForceCommand echo 'This account is closed' >&2"):
            found = asked(cables, "alpha")
        error = found.failed["alpha"]
        assert (error.problem, error.what) == ("command", "it did not run topoplan's script: This account is closed")


class TestTheVerb:
    def test_writes_a_spec_that_rank_takes(self, machines: Bed, tmp_path: Path, topoplan: Topoplan) -> None:
        spec, job = tmp_path / "cluster.yaml", tmp_path / "job.yaml"
        job.write_text(JOB)
        code, out, err = topoplan("probe", "alpha", "beta", "--workdir", "/tmp", "-o", spec)
        assert (code, err) == (0, "")
        assert f"Wrote {spec}" in out
        assert "8 x NVIDIA GeForce RTX 4090" in out
        read = load_spec(spec, model="Qwen/Qwen3-0.6B", job=job)
        assert (read.cluster.nodes, read.cluster.gpus_per_node, read.cluster.fabric.kind) == (2, 8, "ethernet")
        assert [host.address for host in read.cluster.hosts] == ["alpha", "beta"]
        assert {(host.socket_interface, host.workdir) for host in read.cluster.hosts} == {("eth0", "/tmp")}
        code, out, _ = topoplan("rank", spec, "--model", "Qwen/Qwen3-0.6B", "--job", job, "--json")
        assert code == 0
        assert json.loads(out)["plans"]

    def test_init_writes_the_job_below_the_same_cluster(
        self, machines: Bed, tmp_path: Path, topoplan: Topoplan
    ) -> None:
        spec, job = tmp_path / "cluster.yaml", ["--model", "Qwen/Qwen3-0.6B", "--seq-len", "4k", "--batch", "64"]
        found = ["--from-hosts", "alpha", "beta", "--workdir", "/tmp"]
        code, out, err = topoplan("init", *found, *job, "-o", spec)
        assert code == 0
        assert "8 x NVIDIA GeForce RTX 4090" in err
        assert f"Next  topoplan rank {spec}" in out
        read = load_spec(spec)
        assert [(host.address, host.workdir) for host in read.cluster.hosts] == [("alpha", "/tmp"), ("beta", "/tmp")]
        assert (read.job.seq_len, read.job.global_batch_size) == (4096, 64)
        code, _, err = topoplan("init", "--from-hosts", "alpha", "gone", *job, "-o", tmp_path / "other.yaml")
        assert code == 1
        assert "gone" in err
        assert not (tmp_path / "other.yaml").exists()

    def test_puts_the_spec_alone_on_standard_output(self, machines: Bed, tmp_path: Path, topoplan: Topoplan) -> None:
        code, out, err = topoplan("probe", "beta")
        assert code == 0
        (tmp_path / "spec.yaml").write_text(out)
        assert load_spec(tmp_path / "spec.yaml", model="Qwen/Qwen3-0.6B", job=_job(tmp_path)).cluster.nodes == 1
        assert "RTX 4090" in err

    def test_takes_hosts_from_a_file_and_prints_json(self, machines: Bed, tmp_path: Path, topoplan: Topoplan) -> None:
        (tmp_path / "hosts").write_text("alpha slots=8\nbeta slots=8\n")
        code, out, err = topoplan("probe", "--hosts-file", tmp_path / "hosts", "--json")
        assert (code, err) == (0, "")
        view = json.loads(out)
        assert view["schema"] == "topoplan.probe/1"
        assert [host["name"] for host in view["hosts"]] == ["alpha", "beta"]
        assert view["hosts"][0]["facts"]["gpus"][0]["name"] == "NVIDIA GeForce RTX 4090"
        assert view["spec"].startswith("# A cluster as")
        assert (view["complete"], view["written"], view["failed"]) == (True, None, [])

    def test_writes_nothing_while_a_host_is_missing_unless_told_to(
        self, machines: Bed, tmp_path: Path, topoplan: Topoplan
    ) -> None:
        spec = tmp_path / "cluster.yaml"
        code, out, _ = topoplan("probe", "alpha", "gone", "beta", "-o", spec)
        assert code == 1
        assert not spec.exists()
        assert "gone: nothing listens" in " ".join(out.split())
        assert "--partial" in out
        code, _, _ = topoplan("probe", "alpha", "gone", "beta", "-o", spec, "--partial")
        assert code == 0
        assert "nodes: 2" in spec.read_text()

    def test_makes_no_cluster_of_different_gpus(self, machines: Bed, tmp_path: Path, topoplan: Topoplan) -> None:
        equip(machines, {"beta": "l40s-pcie"}, tmp_path)
        code, out, _ = topoplan("probe", "alpha", "beta", "-o", tmp_path / "cluster.yaml")
        assert code == 1
        assert "NVIDIA L40S on beta" in " ".join(out.split())
        assert not (tmp_path / "cluster.yaml").exists()

    def test_finds_a_host_without_gpus(self, topoplan: Topoplan) -> None:
        code, out, err = topoplan("probe", "bare")
        assert (code, out) == (1, "")
        assert "bare: no GPUs: nvidia-smi: not installed" in " ".join(err.split())

    def test_tells_one_machine_under_two_names(self, machines: Bed, topoplan: Topoplan) -> None:
        cables_key = machines.known_hosts.read_text()
        assert machines["beta"].address in cables_key
        code, _, err = topoplan("probe", "beta", "alias-beta")
        assert code == 1
        assert "beta, alias-beta are one machine" in " ".join(err.split())

    def test_writes_an_address_where_the_hosts_do_not_know_the_alias(self, machines: Bed, topoplan: Topoplan) -> None:
        code, out, _ = topoplan("probe", "alpha", "alias-beta")
        assert code == 0
        assert f'address: "{machines["beta"].address}"  # alias-beta, by the address' in out
        assert f"user: {machines.user}" in out

    def test_does_not_overwrite_what_it_did_not_write(self, machines: Bed, tmp_path: Path, topoplan: Topoplan) -> None:
        spec = tmp_path / "cluster.yaml"
        spec.write_text("name: mine\n")
        code, _, err = topoplan("probe", "alpha", "-o", spec)
        assert code == 2
        assert "exists and was not written by `topoplan probe`" in err
        assert spec.read_text() == "name: mine\n"
        assert topoplan("probe", "alpha", "-o", spec, "--force")[0] == 0
        assert topoplan("probe", "alpha", "-o", spec)[0] == 0
        filled = spec.read_text().replace("# model:", "model:")
        spec.write_text(filled)
        code, _, err = topoplan("probe", "alpha", "-o", spec)
        assert code == 2
        assert "was edited since `topoplan probe` wrote it" in err
        assert spec.read_text() == filled

    def test_leaves_nothing_running_or_written_on_the_hosts(self, machines: Bed, topoplan: Topoplan) -> None:
        directory = machines["alpha"].directory / "home"
        before = sorted(directory.iterdir())
        assert topoplan("probe", "alpha")[0] == 0
        assert sorted(directory.iterdir()) == before
        assert all("sshd" in line for line in machines.processes("alpha").values())


def _job(directory: Path) -> Path:
    path = directory / "job.yaml"
    path.write_text(JOB)
    return path
