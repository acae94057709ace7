"""Hosts that are ready to train over InfiniBand, to be broken one fact at a time."""

from dataclasses import fields, replace
from typing import Any

from topoplan.catalog.packages import packages
from topoplan.hosts.facts import (
    AdapterFacts,
    GpuFacts,
    HostFacts,
    InterfaceFacts,
    PathFacts,
    RouteFacts,
)
from topoplan.hosts.needs import RunNeeds
from topoplan.hosts.preflight.fleet import Check, Fleet, Node
from topoplan.hosts.result import Result
from topoplan.specs import known
from topoplan.specs.cluster import Cluster, Fabric, Host
from topoplan.trainers.checkpoint_size import CheckpointSize
from topoplan.trainers.requirements import Requirement
from topoplan.trainers.trainer import DATASET_TO_FILL_IN, Checkpoints, ReadmeWords, TrainerRun

Spans = dict[int, tuple[float, float]]

GIB = 2**30
GIB_PER_S_400 = 50e9
ROUTABLE = "0000:0000:0000:0000:0000:ffff:0a00:0001"


def address(number: int) -> str:
    return f"10.0.0.{number + 1}"


def cluster(*, nodes: int = 2, kind: str = "infiniband", **changes: Any) -> Cluster:
    made = Cluster(
        name="test",
        nodes=nodes,
        gpus_per_node=2,
        gpu=known.gpu("h100-sxm-80gb"),
        nvlink_bytes_per_s=450e9,
        nvlink_domain_gpus=2,
        pcie_bytes_per_s=63e9,
        nics_per_node=2,
        nic_bytes_per_s=GIB_PER_S_400,
        fabric=Fabric(kind=kind),
        hosts=tuple(Host(address=address(number), workdir="/work", venv="/venv") for number in range(nodes)),
    )
    return replace(made, **changes)


def required(*names: str, **versions: str) -> tuple[Requirement, ...]:
    """Return requirements for packages of any version, and for packages of given versions."""
    wanted = {**dict.fromkeys(names, ""), **{name.replace("_", "-"): bound for name, bound in versions.items()}}
    return tuple(
        Requirement(package=packages()[name], versions=bound, why="it fails" if bound else "")
        for name, bound in wanted.items()
    )


def needs(*, has_dataset: bool = True, resumable: bool = True, **changes: Any) -> RunNeeds:
    own = {field.name for field in fields(RunNeeds)} & changes.keys()
    run = TrainerRun(
        model_dir="models/m",
        dataset="mine" if has_dataset else DATASET_TO_FILL_IN,
        dataset_dir="data",
        output_dir="saves/a-run",
        requirements=required("torch", "llamafactory", "transformers", megatron_core=">=0.15,<0.19"),
        checkpoint=CheckpointSize(megatron_bytes=16 * GIB, hf_bytes=0, optimizer_bytes=84 * GIB, at_once=2),
        checkpoints=Checkpoints(resumable=resumable),
        readme=ReadmeWords(engine="", packages="", install=(), progress="", resume=""),
    )
    run = replace(run, **{key: value for key, value in changes.items() if key not in own})
    made = RunNeeds(run=run, model_bytes=16 * GIB, master_port=23456, gpu_bytes=60 * GIB, host_bytes=0.0)
    return replace(made, **{key: changes[key] for key in own})


def gpu(index: int, host: int = 0, **changes: Any) -> GpuFacts:
    made = GpuFacts(
        index=index,
        name="NVIDIA H100 80GB HBM3",
        uuid=f"GPU-{host}-{index}",
        memory_bytes=81559 * 2**20,
        memory_used_bytes=4 * 2**20,
    )
    return replace(made, **changes)


def adapter(index: int, **changes: Any) -> AdapterFacts:
    made = AdapterFacts(
        device=f"mlx5_{index}",
        port=1,
        link_layer="InfiniBand",
        state="ACTIVE",
        rate_bytes_per_s=GIB_PER_S_400,
        active_mtu_bytes=4096,
    )
    return replace(made, **changes)


def roce(index: int, **changes: Any) -> AdapterFacts:
    gids = {0: ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"), 3: (ROUTABLE, "RoCE v2")}
    return adapter(index, link_layer="Ethernet", gids=gids, **changes)


def path(name: str, **changes: Any) -> PathFacts:
    made = PathFacts(
        path=name,
        exists=True,
        is_writable=True,
        file_system="nfs4",
        mount="store:/all",
        free_bytes=4000 * GIB,
        fingerprint="same",
        size_bytes=16 * GIB,
        files=7,
    )
    return replace(made, **changes)


def facts(number: int = 0, **changes: Any) -> HostFacts:
    own = address(number)
    made = HostFacts(
        hostname=f"host{number}",
        gpus=(gpu(0, number), gpu(1, number)),
        gpu_processes=(),
        adapters=(adapter(0), adapter(1)),
        interfaces=(
            InterfaceFacts(name="lo", addresses=("127.0.0.1", "::1"), mtu_bytes=65536, is_up=True),
            InterfaceFacts(name="eth0", addresses=(own, "fe80::1"), mtu_bytes=9000, is_up=True, speed_bytes_per_s=50e9),
            InterfaceFacts(name="docker0", addresses=("172.17.0.1",), mtu_bytes=1500, is_up=True),
        ),
        routes=(
            RouteFacts(address=address(0), resolved=(address(0),), interface="eth0" if number else "lo", source=own),
        ),
        default_interface="eth0",
        cpu_cores=64,
        memory_bytes=1000 * GIB,
        memory_available_bytes=900 * GIB,
        shm_bytes=500 * GIB,
        shm_free_bytes=499 * GIB,
        memlock_bytes=-1,
        port_range=(32768, 60999),
        listening_ports=frozenset({22}),
        peermem=True,
        kernel="5.4.0-100-generic",
        clock_s=1000.0,
        paths={
            one.path: one
            for one in (
                path("/work"),
                path("/work/models/m"),
                path("/work/data"),
                path("/work/saves/a-run", exists=False, files=None, fingerprint="", size_bytes=None),
            )
        },
        python="/venv/bin/python",
        versions={
            "driver": "550.54.15",
            "cuda": "12.4",
            "python": "3.11.7",
            "torch": "2.6.0",
            "nccl": "2.21.5",
            "transformers": "4.57.1",
            "llamafactory": "0.9.5",
            "megatron-core": "0.16.1",
        },
        nccl_settings={},
        in_container=False,
    )
    return replace(made, **changes)


def with_path(one: HostFacts, name: str, **changes: Any) -> HostFacts:
    return replace(one, paths={**one.paths, name: replace(one.paths[name], **changes)})


def fleet(
    *said: HostFacts, wanted: RunNeeds | None = None, of: Cluster | None = None, query_times_s: Spans | None = None
) -> Fleet:
    """Return a fleet of the hosts; by default of two that are ready."""
    hosts = said or (facts(0), facts(1))
    place = of or cluster(nodes=len(hosts))
    return Fleet(
        cluster=place,
        needs=wanted,
        nodes=tuple(
            Node(
                number=number,
                name=f"n{number}",
                host=place.hosts[number],
                facts=one,
                query_times_s=(query_times_s or {}).get(number),
            )
            for number, one in enumerate(hosts)
        ),
    )


def second(of: Cluster | None = None, **changes: Any) -> Fleet:
    """Return a fleet in which the second of three hosts differs."""
    return fleet(facts(0), facts(1, **changes), facts(2), of=of or cluster(nodes=3))


def told(**changes: Any) -> Cluster:
    """Return a cluster of three hosts of which the spec says more."""
    place = cluster(nodes=3)
    return replace(place, hosts=tuple(replace(host, **changes) for host in place.hosts))


def see(check: Check, of: Fleet, number: int = 0) -> Result | None:
    return check(of, of.nodes[number])


def outcome(check: Check, of: Fleet, number: int = 0) -> str | None:
    """Return the result in short; None if the check does not apply."""
    found = see(check, of, number)
    if found is None:
        return None
    assert found.what
    assert not found.what.endswith(".")
    assert not found.remedy.endswith(".")
    assert bool(found.remedy) == (found.outcome in ("warning", "failure"))
    return found.outcome
