"""The script is really run, by bash and by dash, with stand-ins for tools that need hardware."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import topoplan
from tests.bundle.shell_scripts import assert_sound
from tests.hosts.machines import answer, facts, stand_in
from topoplan.hosts.collect import COLLECT, CollectRequest, collect_arguments, host_facts
from topoplan.hosts.facts import HostFacts
from topoplan.hosts.sections import read_sections

ROOT = Path(topoplan.__file__).parent
PROGRAMS = sorted(path for room in ("remote", "hosts") for path in (ROOT / room / "scripts").glob("*.sh"))
SHELLS = [shell for shell in ("bash", "dash") if shutil.which(shell)]


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ran(
    shell: str,
    wanted: CollectRequest,
    *,
    tools: Path | None = None,
    changes: tuple[tuple[str, str], ...] = (),
    **environment: str,
) -> bytes:
    """Return the script's output; `tools` precede the PATH."""
    script = COLLECT
    for old, new in changes:
        assert old in script
        script = script.replace(old, new, 1)
    path = os.environ["PATH"] if tools is None else f"{tools}:{os.environ['PATH']}"
    done = subprocess.run(
        [shell, "-s", *collect_arguments(wanted)],
        input=script.encode(),
        capture_output=True,
        timeout=300,
        env={**os.environ, "PATH": path, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    return done.stdout


def read(shell: str, wanted: CollectRequest, **how: object) -> HostFacts:
    return host_facts(ran(shell, wanted, **how))  # type: ignore[arg-type]


def program(directory: Path, name: str, text: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(f"#!/bin/sh\n{text}\n")
    (directory / name).chmod(0o755)


QUICK = CollectRequest(versions=False, gpus=False)


class TestThisMachine:
    def test_says_what_every_linux_knows(self, shell: str) -> None:
        found = read(shell, CollectRequest(routes=("127.0.0.1", "localhost"), python=sys.executable))
        assert found.hostname == os.uname().nodename
        assert found.kernel == os.uname().release
        assert found.memory_bytes > 2**28
        assert found.memory_available_bytes is not None
        assert found.shm_bytes
        assert found.open_files
        assert found.memlock_bytes is not None
        assert found.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        assert found.port_range == (int(low), int(high))
        assert abs(found.clock_s - time.time()) < 600
        assert found.versions["python"] == sys.version.split()[0]
        assert [route.address for route in found.routes] == ["127.0.0.1", "localhost"]
        assert found.routes[0].resolved == ("127.0.0.1",)
        assert "end" not in found.missing

    def test_says_why_something_is_not_known(self, shell: str) -> None:
        changes = (("command -v nvidia-smi >/dev/null || return 127", "return 127"),)
        found = read(shell, CollectRequest(versions=False), changes=changes)
        assert found.gpus is None
        assert found.missing["gpus"] == "nvidia-smi: not installed"
        assert "versions" in found.missing

    def test_is_read_in_the_order_in_which_it_was_asked(self, shell: str) -> None:
        names = [
            section.name
            for section in read_sections(ran(shell, CollectRequest(paths=("/etc",), routes=("127.0.0.1",))))
        ]
        assert names[0] == "clock"
        assert names[-1] == "end"
        assert len(names) == len(set(names))


class TestGpus:
    def test_are_those_that_nvidia_smi_lists(self, shell: str, tmp_path: Path) -> None:
        found = read(shell, CollectRequest(versions=False), tools=stand_in(tmp_path / "bin", "dgx-h100"))
        assert len(found.gpus) == 8
        assert found.gpus[7].nvlink_bytes_per_s == 450e9
        assert found.gpus[4].numa_node == 1
        assert found.topology["GPU0", "mlx5_0"] == "PXB"
        assert found.versions["driver"] == "550.90.07"
        assert found.gpu_processes == ()

    def test_of_a_driver_without_mig_are_asked_for_again(self, shell: str, tmp_path: Path) -> None:
        text = (
            'case "$*" in *mig.mode*) echo "Field \\"mig.mode.current\\" is not a valid field to query."; exit 2;;\n'
            f'esac\nexec {stand_in(tmp_path / "real", "titan-old-driver")}/nvidia-smi "$@"'
        )
        program(tmp_path / "bin", "nvidia-smi", text)
        found = read(shell, CollectRequest(versions=False), tools=tmp_path / "bin")
        assert len(found.gpus) == 8

    def test_say_what_the_driver_complains_of(self, shell: str, tmp_path: Path) -> None:
        program(
            tmp_path / "bin", "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"
        )
        found = read(shell, CollectRequest(versions=False), tools=tmp_path / "bin")
        assert found.gpus is None
        assert "Driver/library version mismatch" in found.missing["gpus"]

    def test_that_never_answer_hold_nothing_up(self, shell: str, tmp_path: Path) -> None:
        # A program that ignores signals, and one that leaves a child behind with its output open.
        program(tmp_path / "bin", "nvidia-smi", "trap '' TERM INT\n(trap '' TERM; sleep 8) &\nsleep 8")
        limits = tuple(
            (f"section {name} {seconds} ", f"section {name} 1 ")
            for name, seconds in (("gpus", 30), ("gpu-processes", 25), ("topology", 22), ("nvlink", 22))
        )
        found = read(shell, CollectRequest(versions=False), tools=tmp_path / "bin", changes=limits)
        assert found.gpus is None
        assert found.missing["gpus"] == "nvidia-smi: no answer in time"
        assert found.memory_bytes
        assert "end" not in found.missing

    def test_owners_of_processes_come_from_ps(self, shell: str, tmp_path: Path) -> None:
        lines = f"pid, gpu_uuid, used_gpu_memory [MiB], process_name\\n{os.getpid()}, GPU-1, 10 MiB, python"
        program(tmp_path / "bin", "nvidia-smi", f'case "$*" in *compute-apps*) printf "{lines}\\n";; *) exit 1;; esac')
        found = read(shell, CollectRequest(versions=False), tools=tmp_path / "bin")
        (process,) = found.gpu_processes
        assert process.pid == os.getpid()
        assert process.user
        assert process.age_s is not None


class TestAdapters:
    def test_are_read_from_sysfs(self, shell: str, tmp_path: Path) -> None:
        sys_root = tmp_path / "sys"
        device = sys_root / "devices" / "pci0000:15" / "0000:18:00.0"
        (device / "net" / "ibp24s0").mkdir(parents=True)
        (device / "net" / "ibp24s0" / "dev_port").write_text("0\n")
        (device / "numa_node").write_text("1\n")
        adapter = sys_root / "class" / "infiniband" / "mlx5_0"
        port = adapter / "ports" / "1"
        for name in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (port / name).mkdir(parents=True)
        (adapter / "device").symlink_to(device)
        files = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "Ethernet"}
        files |= {f"gids/{index}": "0000:" * 7 + "0000" for index in range(9)}
        files |= {"gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001", "gid_attrs/types/3": "RoCE v2"}
        files |= {"gid_attrs/ndevs/3": "bond1"}
        for name, text in files.items():
            (port / name).write_text(text + "\n")
        (adapter / "tc" / "1").mkdir(parents=True)
        (adapter / "tc" / "1" / "traffic_class").write_text("Global tclass=106\n")
        found = read(shell, QUICK, changes=(("sys=/sys\n", f"sys='{sys_root}'\n"),))
        (one,) = found.adapters
        assert (one.device, one.port, one.state, one.link_layer) == ("mlx5_0", 1, "ACTIVE", "Ethernet")
        assert (one.rate_bytes_per_s, one.interface, one.numa_node, one.pci_bus) == (50e9, "bond1", 1, "0000:18:00.0")
        assert one.gids == {3: ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2")}
        assert one.traffic_class == 106

    def test_of_a_machine_without_any_are_none(self, shell: str, tmp_path: Path) -> None:
        (tmp_path / "sys" / "class").mkdir(parents=True)
        assert read(shell, QUICK, changes=(("sys=/sys\n", f"sys='{tmp_path}/sys'\n"),)).adapters == ()


def test_the_machine_is_known_by_firmware_and_pci_devices(shell: str, tmp_path: Path) -> None:
    sys_root, proc_root = tmp_path / "sys", tmp_path / "proc"
    for name, text in (("sys_vendor", "Google"), ("product_name", "Google Compute Engine"), ("chassis_asset_tag", "")):
        target = sys_root / "class" / "dmi" / "id" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}\n")
    for address, device in (("0000:06:00.1", "0x0084"), ("0000:07:00.1", "0x0084"), ("0000:00:0c.0", "0x0042")):
        at = sys_root / "bus" / "pci" / "devices" / address
        at.mkdir(parents=True)
        (at / "vendor").write_text("0x1ae0\n")
        (at / "device").write_text(f"{device}\n")
    changes = (("sys=/sys\n", f"sys='{sys_root}'\n"), ("proc=/proc\n", f"proc='{proc_root}'\n"))
    found = read(shell, QUICK, changes=changes)
    assert found.firmware == {"sys_vendor": "Google", "product_name": "Google Compute Engine"}
    assert found.pci == ("1ae0:0042", "1ae0:0084")
    assert found.daemons == ()
    (proc_root / "77").mkdir(parents=True)
    (proc_root / "77" / "comm").write_text("fastrak_gpumem_\n")
    assert read(shell, QUICK, changes=changes).daemons == ("fastrak_gpumem_manager",)


class TestPaths:
    def test_of_equal_directories_have_one_fingerprint(self, shell: str, tmp_path: Path) -> None:
        for name in ("one", "two", "other name", "other size", "other config"):
            directory = tmp_path / name / "model dir's"
            (directory / "sub").mkdir(parents=True)
            (directory / "weights.safetensors").write_bytes(b"x" * 5000)
            (directory / "config.json").write_text('{"layers": 1}')
            (directory / "sub" / "part").write_text("abc")
        (tmp_path / "other name/model dir's/sub/part").rename(tmp_path / "other name/model dir's/sub/piece")
        (tmp_path / "other size/model dir's/sub/part").write_text("abcd")
        (tmp_path / "other config/model dir's/config.json").write_text('{"layers": 2}')
        # Hidden files do not count: downloads leave lock files there.
        (tmp_path / "two/model dir's/.cache").mkdir()
        (tmp_path / "two/model dir's/.cache/lock").write_text("1")
        paths = tuple(str(path) for path in sorted(tmp_path.glob("*/model dir's")))
        found = {
            Path(path).parent.name: fact
            for path, fact in read(shell, CollectRequest(paths=paths, versions=False)).paths.items()
        }
        one = found["one"]
        assert (one.exists, one.is_writable, one.files, one.size_bytes) == (True, True, 3, 5000 + 13 + 3)
        assert one.file_system
        assert one.free_bytes
        assert len(one.fingerprint) == 64
        assert found["two"].fingerprint == one.fingerprint
        assert len({fact.fingerprint for fact in found.values()}) == 4

    def test_name_the_directories_that_may_be_checkpoints(self, shell: str, tmp_path: Path) -> None:
        for name in ("checkpoint-50/a.bin", "checkpoint-50/b/c.bin", "checkpoint-100/a.bin", "runs/checkpoint-7/a"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("x")
        (tmp_path / "checkpoint-200").mkdir()
        (tmp_path / "trainer_log-1").write_text("x")
        (tmp_path / "runs" / "alone").mkdir()
        paths = (str(tmp_path), str(tmp_path / "runs" / "checkpoint-7"), str(tmp_path / "runs" / "alone"))
        found = read(shell, CollectRequest(paths=paths, versions=False)).paths
        assert [sorted(found[path].numbered or ()) for path in paths] == [["checkpoint-100", "checkpoint-50"], [], []]
        assert None not in [found[path].numbered for path in paths]

    def test_follow_links_as_a_model_hub_has_them(self, shell: str, tmp_path: Path) -> None:
        (tmp_path / ".cache" / "blobs").mkdir(parents=True)
        (tmp_path / ".cache" / "blobs" / "0af3").write_text("weights")
        snapshot = tmp_path / ".cache" / "snapshots" / "1"
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to("../../blobs/0af3")
        fact = read(shell, CollectRequest(paths=(str(snapshot),), versions=False)).paths[str(snapshot)]
        assert (fact.files, fact.size_bytes) == (1, 7)

    def test_that_are_files_are_read_when_they_are_small(self, shell: str, tmp_path: Path) -> None:
        for name, text in (("a", "same"), ("b", "same"), ("c", "else")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "train.jsonl").write_text(text)
        paths = tuple(str(tmp_path / name / "train.jsonl") for name in "abc")
        a, b, c = read(shell, CollectRequest(paths=paths, versions=False)).paths.values()
        assert (a.files, a.size_bytes) == (1, 4)
        assert a.fingerprint == b.fingerprint != c.fingerprint

    def test_that_do_not_exist_tell_of_the_directory_above(self, shell: str, tmp_path: Path) -> None:
        path = str(tmp_path / "not" / "there yet")
        fact = read(shell, CollectRequest(places=(path,), versions=False)).paths[path]
        assert (fact.exists, fact.is_writable, fact.files) == (False, True, None)
        assert fact.free_bytes

    def test_that_hang_hold_nothing_up(self, shell: str, tmp_path: Path) -> None:
        program(tmp_path / "bin", "df", "trap '' TERM\nsleep 8")
        changes = (("section path 22 ", "section path 1 "), ("section shared-memory 4 ", "section shared-memory 1 "))
        wanted = CollectRequest(places=("/tmp",), versions=False, gpus=False)
        found = read(shell, wanted, tools=tmp_path / "bin", changes=changes)
        assert found.paths["/tmp"].exists
        assert found.paths["/tmp"].free_bytes is None
        assert found.missing["shm_bytes"] == "df /dev/shm: no answer in time"

    def test_are_never_taken_for_shell(self, shell: str, tmp_path: Path) -> None:
        path = f"{tmp_path}/$(touch {tmp_path}/oops)`touch {tmp_path}/oops`; touch {tmp_path}/oops '\" -name"
        fact = read(shell, CollectRequest(paths=(path,), places=(path + "2",), versions=False)).paths[path]
        assert not fact.exists
        assert not (tmp_path / "oops").exists()


class TestVersions:
    def test_are_read_without_importing_anything(self, shell: str, tmp_path: Path) -> None:
        site = tmp_path / "site"
        (site / "torch").mkdir(parents=True)
        (site / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
        (site / "torch" / "version.py").write_text("__version__ = '2.6.0+cu124'\ncuda: Optional[str] = '12.4'\n")
        for name, version in (("nvidia_nccl_cu12", "2.21.5"), ("llamafactory", "0.9.4"), ("megatron_core", "0.15.0")):
            info = site / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        found = read(shell, CollectRequest(python=sys.executable, gpus=False), PYTHONPATH=str(site))
        assert found.python == sys.executable
        expected = {"torch": "2.6.0+cu124", "cuda": "12.4", "nccl": "2.21.5", "llamafactory": "0.9.4"}
        assert expected.items() <= found.versions.items()
        assert found.versions["megatron-core"] == "0.15.0"

    def test_of_a_python_that_is_not_there_are_missing(self, shell: str) -> None:
        found = read(shell, CollectRequest(python="/no/such/venv/bin/python", gpus=False))
        assert found.versions == {}
        assert found.missing["versions"] == "python: not installed"


def test_nccl_settings_of_the_session_are_told(shell: str, tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("NCCL_SOCKET_IFNAME=eth0\n")
    found = read(shell, QUICK, HOME=str(tmp_path), NCCL_DEBUG="INFO")
    assert found.nccl_settings["NCCL_DEBUG"] == "INFO"
    assert found.nccl_settings["NCCL_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize("script", PROGRAMS, ids=lambda one: one.name)
def test_the_programs_are_what_shellcheck_likes(script: Path) -> None:
    assert_sound(script.read_text())


class TestHostFacts:
    def test_joins_all_that_a_host_said(self) -> None:
        found = facts("dgx-h100", routes=[("node1", "10.0.0.11", "bond0")])
        assert found.hostname == "node0"
        assert found.gpus[0].nvlink_count == 18
        assert found.adapters[0].active_mtu_bytes == 4096
        assert (found.sockets, found.cpu_cores) == (2, 112)
        assert found.memlock_bytes == -1
        assert found.default_interface == "bond0"
        assert found.routes[0].interface == "bond0"
        assert found.clock_s == 1790000000.123456789
        assert found.peermem is True
        assert found.python == "/opt/venv/bin/python"
        assert "executable" not in found.versions

    def test_says_when_the_answer_was_cut_off(self) -> None:
        found = host_facts(answer("dgx-h100")[:2000])
        assert found.missing["end"] == "the host's answer was cut off"
        assert found.missing["topology"].endswith("its answer was lost")
        assert found.memory_bytes

    def test_of_nothing_is_nothing(self) -> None:
        found = host_facts(b"")
        assert found.gpus is None
        assert found.hostname == ""
        assert found.missing["memory_bytes"]

    @given(st.data())
    def test_never_raises(self, data: st.DataObject) -> None:
        output = bytearray(answer("hgx-h20", routes=[("node1", "10.0.0.11", "bond0")]))
        for _ in range(data.draw(st.integers(1, 5))):
            start = data.draw(st.integers(0, len(output)))
            output[start : start + data.draw(st.integers(0, 300))] = data.draw(st.binary(max_size=50))
        host_facts(bytes(output))
