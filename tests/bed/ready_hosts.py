"""Machines of the bed that look ready to train.

Each has two GPUs according to its nvidia-smi, a virtual environment with the names of the trainer's packages, a model
and data.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.bed.bed import Bed, Machine
from topoplan import load_spec, predict
from topoplan.hosts.needs import RunNeeds, needs_of
from topoplan.specs.spec import Spec

NAMES = ("n0", "n1", "n2", "n3")
VERSIONS = {
    "torch": "2.6.0",
    "transformers": "4.57.1",
    "llamafactory": "0.9.5",
    "megatron-core": "0.16.1",
    "mcore_adapter": "0.10.0",
    "transformer-engine": "2.8.0",
    "nvidia-nccl-cu12": "2.21.5",
}
_SMI = """\
#!/bin/sh
case "$*" in
*--query-gpu*)
    echo 'index, name, uuid, memory.total [MiB], memory.used [MiB], pci.bus_id, pcie.link.gen.max, \
pcie.link.width.max, utilization.gpu [%], driver_version, mig.mode.current'
    for card in 0 1; do
        echo "$card, NVIDIA H100 80GB HBM3, GPU-{host}-$card, 81559 MiB, 4 MiB, 00000000:1$card:00.0, 5, 16, 0 %, \
550.54.15, Disabled"
    done ;;
*--query-compute-apps*) echo 'pid, gpu_uuid, used_gpu_memory [MiB], process_name' ;;
*) exit 1 ;;
esac
"""
_SPEC = """\
name: bed
nodes: {nodes}
gpus_per_node: 2
gpu: h100-sxm-80gb
nvlink_bandwidth: 900GB/s
ib_bandwidth: 100Gb/s
nics_per_node: 1
fabric: {{kind: ethernet}}
hosts:
{hosts}
model: Qwen/Qwen3-0.6B
job:
  seq_len: 512
  global_batch_size: 64
  dataset: mine
"""


@contextmanager
def ready_hosts(directory: Path) -> Iterator[Bed]:
    """Yield the bed, with everything below `directory`."""
    for name in NAMES:
        _make(directory / name, name)
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    machines = [
        # sshd uses only its first SetEnv.
        Machine(name=name, options=(f"SetEnv HOME={directory}/{name}/home PATH={directory}/{name}/bin:{path}",))
        for name in NAMES
    ]
    with Bed(directory / "bed", machines) as bed:
        yield bed


def spec_of(bed: Bed, directory: Path) -> Spec:
    """Return the spec of the bed's hosts."""
    lines = [
        f"  - {{address: {host.address}, port: {host.port}, workdir: {directory}/{name}/work,"
        f" venv: {directory}/{name}/venv}}"
        for name, host in bed.hosts.items()
    ]
    file = directory / "cluster.yaml"
    file.write_text(_SPEC.format(nodes=len(NAMES), hosts="\n".join(lines)))
    return load_spec(file)


def wanted(spec: Spec) -> RunNeeds:
    """Return the needs of a run with two GPUs per host."""
    return needs_of(spec, predict(spec, {"tp": 2, "pp": 1, "micro_batch_size": 1}))


def _make(home: Path, name: str) -> None:
    for part in ("home", "bin", "work/data", "work/models/Qwen/Qwen3-0.6B"):
        (home / part).mkdir(parents=True)
    smi = home / "bin" / "nvidia-smi"
    smi.write_text(_SMI.replace("{host}", name))
    smi.chmod(0o755)
    (home / "work/data/dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}}')
    model = home / "work/models/Qwen/Qwen3-0.6B"
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    with (model / "model.safetensors").open("wb") as file:
        os.truncate(file.fileno(), 1_503_300_328)  # no blocks are taken on the disk
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
    (site,) = (home / "venv" / "lib").glob("python3*/site-packages")
    for package, version in VERSIONS.items():
        info = site / f"{package.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
