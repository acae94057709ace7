"""What a launch costs, on real sshd processes in network namespaces: time to start 32 hosts, lag of output, memory, and
a core's time for logs.

    make bench                            or: python tests/bench/launching.py [--rounds N] [--check]

The time to start is a ratio to OpenSSH's own client, 32 of them at once, in turns, so that a busy machine slows both.
With --check the exit code is 1 when a limit is broken. Without sshd or namespaces it says so and ends well.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout, and its tests

from tests.bed.bed import Bed, Machine, probe
from topoplan.errors import HostError
from topoplan.remote.connection import Connection
from topoplan.remote.fanout import connect_all, run_on_all
from topoplan.remote.identities import Access
from topoplan.remote.ssh_config import Target
from topoplan.remote.upload import upload
from topoplan.run.node import start_node, stop_node
from topoplan.run.watch import Watch
from topoplan.run.watched import WatchedNode

HOSTS, MANY = 32, 64
RATIO_LIMIT, LAG_LIMIT_S, PEAK_LIMIT_BYTES, RATE_LIMIT = 0.5, 0.050, 150 * 10**6, 80 * 10**6
LOG_BYTES, EACH_BYTES = 300 * 10**6, 10**6
LIMIT_S = 60.0
SCRIPT = "job.sh"
LINES, EVERY_S = 300, 0.01

FOLLOWER = Path(__file__).with_name("follower.py")

SPEC = """
name: many
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
job: {{seq_len: 512, global_batch_size: 64, dataset: mine}}
"""
FILES = {"node.sh": 5_000, "train.yaml": 3_000, "plan.json": 6_000, "hosts.json": 9_000, "README.md": 6_000}
"""As large as those of a bundle, in bytes."""


def targets(bed: Bed, count: int) -> dict[str, Target]:
    """By name; a host may be there twice."""
    names = list(bed.hosts)
    return {f"n{index}": bed.target(names[index % len(names)], name=f"n{index}") for index in range(count)}


def put_script(bed: Bed, text: str) -> dict[str, str]:
    """The run directory of each host, with a job in it."""
    run = f"bench-{uuid.uuid4().hex[:8]}"
    places = {}
    for host in bed.hosts.values():
        place = host.directory / "home" / run
        place.mkdir()
        (place / SCRIPT).write_text(text)
        places[host.name] = str(place)
    return places


def good(results: dict[str, Connection | HostError]) -> dict[str, Connection]:
    """The connections; an error ends the benchmark."""
    for result in results.values():
        if isinstance(result, HostError):
            raise result
    return {name: result for name, result in results.items() if isinstance(result, Connection)}


def ours_s(bed: Bed) -> float:
    """Seconds from nothing to a job that runs on every host."""
    places = put_script(bed, "exec sleep 60\n")
    by_name = dict(zip((f"n{index}" for index in range(HOSTS)), places.values(), strict=True))
    started_s = time.perf_counter()
    connections = good(connect_all(targets(bed, HOSTS), Access(), deadline_s=LIMIT_S))

    def start(name: str, connection: Connection) -> None:
        start_node(connection, run_dir=by_name[name], script=SCRIPT, environment={}, deadline_s=LIMIT_S)

    errors = [each for each in run_on_all(connections, start, deadline_s=LIMIT_S).values() if each is not None]
    took_s = time.perf_counter() - started_s
    if errors:
        raise errors[0]
    run_on_all(
        connections,
        lambda name, one: stop_node(one, by_name[name], grace_s=1, deadline_s=LIMIT_S),
        deadline_s=LIMIT_S,
    )
    for connection in connections.values():
        connection.close()
    return took_s


def openssh_s(bed: Bed) -> float:
    """The same with one `ssh` for each host, all at once: a job in a session of its own, without a log or a record."""
    places = put_script(bed, "exec sleep 60\n")
    started_s = time.perf_counter()
    clients = [
        subprocess.Popen(
            bed.ssh(name, f"cd {place} && (setsid bash {SCRIPT} >log 2>&1 </dev/null &)"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name, place in places.items()
    ]
    codes = [client.wait(LIMIT_S) for client in clients]
    took_s = time.perf_counter() - started_s
    if any(codes):
        raise RuntimeError(f"ssh ended with {sorted(set(codes))}")
    for name in places:
        for pid, line in bed.processes(name).items():
            if line == "sleep 60":
                subprocess.run(["kill", "-KILL", str(pid)], check=False)
    return took_s


def no_way(name: str, deadline_s: float) -> Connection:
    """No connection is lost here."""
    raise HostError("lost", host=name, problem="lost")


def lags_s(bed: Bed, hosts: int = 4) -> list[float]:
    """How long lines take from a job on a host to this process, through its log there; the clock is the same."""
    code = f"import time\nfor _ in range({LINES}): print(time.time(), flush=True); time.sleep({EVERY_S})"
    places = put_script(bed, f"sleep 1; exec {sys.executable} -c '{code}'\n")
    wanted = dict(list(zip((f"n{index}" for index in range(HOSTS)), places.values(), strict=True))[:hosts])
    connections = good(connect_all({name: targets(bed, HOSTS)[name] for name in wanted}, Access(), deadline_s=LIMIT_S))
    for name, place in wanted.items():
        start_node(connections[name], run_dir=place, script=SCRIPT, environment={}, deadline_s=LIMIT_S)
    nodes = [
        WatchedNode(node=node, name=name, address=name, run_dir=place, connection=connections[name], log=None)
        for node, (name, place) in enumerate(wanted.items())
    ]
    found, rest = [], dict.fromkeys(wanted, b"")

    def take(name: str, data: bytes) -> None:
        now_s = time.time()
        *lines, rest[name] = (rest[name] + data).split(b"\n")
        found.extend(now_s - float(line) for line in lines)

    watch = Watch(nodes, tell=lambda event: None, reconnect=no_way, on_data=take)
    watch.until(lambda: False, deadline_s=LIMIT_S)
    watch.close()
    for connection in connections.values():
        connection.close()
    if len(found) != hosts * LINES:
        raise RuntimeError(f"{len(found)} lines came, of {hosts * LINES}")
    return found


def followed(bed: Bed, count: int, each_bytes: int) -> dict[str, float]:
    """What it takes a process to follow the logs of so many hosts."""
    wanted = targets(bed, count)
    line = "x" * 99
    job = f"yes {line} | head -c {each_bytes}\n"
    connections = good(connect_all(wanted, Access(), deadline_s=LIMIT_S))
    run_dirs = {}
    for name, connection in connections.items():
        place = bed[wanted[name].alias].directory / "home" / f"follow-{uuid.uuid4().hex[:8]}"
        place.mkdir()
        (place / SCRIPT).write_text(job)
        run_dirs[name] = str(place)
        start_node(connection, run_dir=str(place), script=SCRIPT, environment={}, deadline_s=LIMIT_S)
        connection.close()
    while not all(Path(place, ".topoplan", "exit").exists() for place in run_dirs.values()):
        time.sleep(0.1)
    given = [
        {
            "name": one.name,
            "alias": one.alias,
            "hostname": one.hostname,
            "user": one.user,
            "port": one.port,
            "identity_files": [str(bed.key)],
            "user_known_hosts_files": [str(bed.known_hosts)],
        }
        for one in wanted.values()
    ]
    done = subprocess.run(
        [sys.executable, str(FOLLOWER)],
        input=json.dumps({"targets": given, "run_dirs": run_dirs}).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=300,
    )
    for place in run_dirs.values():
        shutil.rmtree(place)
    found: dict[str, float] = json.loads(done.stdout)
    if found["bytes"] != count * each_bytes:
        raise RuntimeError(f"{found['bytes']} bytes came, of {count * each_bytes}")
    return found


def upload_s(bed: Bed) -> float:
    """Seconds to put the files of a bundle on hosts that are logged in to."""
    files = {name: os.urandom(size) for name, size in FILES.items()}
    places = {
        name: f"{place}/run" for name, place in zip(targets(bed, HOSTS), put_script(bed, "").values(), strict=True)
    }
    connections = good(connect_all(targets(bed, HOSTS), Access(), deadline_s=LIMIT_S))
    started_s = time.perf_counter()
    done = run_on_all(
        connections, lambda name, one: upload(one, files, places[name], deadline_s=LIMIT_S), deadline_s=LIMIT_S
    )
    took_s = time.perf_counter() - started_s
    for connection in connections.values():
        connection.close()
    for error in filter(None, done.values()):
        raise error
    return took_s


def preflight_costs(folder: Path) -> tuple[float, float, float]:
    """Of `topoplan preflight` on many hosts: seconds, the client's own of them on a processor, its peak bytes."""
    with Bed(folder / "many", [Machine(name=f"m{index}") for index in range(MANY)]) as bed:
        hosts = "\n".join(f"  - {{address: {host.address}, workdir: {folder}}}" for host in bed.hosts.values())
        spec = folder / "many.yaml"
        spec.write_text(SPEC.format(nodes=MANY, hosts=hosts))
        said = folder / "many.json"
        started_s = time.perf_counter()
        with said.open("wb") as output:
            client = subprocess.Popen(
                [sys.executable, "-m", "topoplan", "preflight", str(spec), "--json"],
                env={**os.environ, "HOME": str(bed.home), "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
                stdout=output,
            )
            _, status, used = os.wait4(client.pid, 0)
        took_s = time.perf_counter() - started_s
        client.returncode = os.waitstatus_to_exitcode(status)
        failed = [check for check in json.loads(said.read_text())["checks"] if check["outcome"] == "failure"]
        if failed or client.returncode != 0:
            raise RuntimeError(f"exit code {client.returncode}, {len(failed)} checks failed: {failed[:1]}")
        return took_s, used.ru_utime + used.ru_stime, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> int:
    """Print six lines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of starting, in turns with OpenSSH")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a limit is broken")
    options = parser.parse_args()
    kind, reason = probe()
    if kind != "namespaces":
        print(f"\nlaunching: skipped, no sshd in network namespaces here: {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="topoplan-bench-") as folder:
        with Bed(Path(folder) / "bed", [Machine(name=f"h{index}") for index in range(HOSTS)]) as bed:
            ours_s(bed)  # imports, and the pages of sshd
            pairs = [(ours_s(bed), openssh_s(bed)) for _ in range(options.rounds)]
            mine_s, theirs_s = (statistics.median(times) for times in zip(*pairs, strict=True))
            ratio = statistics.median(mine / theirs for mine, theirs in pairs)
            lags = sorted(lags_s(bed))
            lag_s, late_s = statistics.median(lags), lags[int(0.99 * len(lags))]
            peak = followed(bed, MANY, EACH_BYTES)["peak_bytes"]
            log = followed(bed, 1, LOG_BYTES)
            rate = log["bytes"] / log["cpu_s"]
            put_s = statistics.median(upload_s(bed) for _ in range(options.rounds))
        asked_s, own_s, asking = preflight_costs(Path(folder))
    print(f"\n{'launching':44} {'found':>10} {'limit':>8}")
    print(
        f"{f'connect to started, {HOSTS} hosts, x OpenSSH':44} {ratio:10.2f} {RATIO_LIMIT:8.1f}"
        f"   ({mine_s:.2f} s to {theirs_s:.2f} s)"
    )
    print(f"{'lag of a line, median / 99th percentile, ms':44} {1e3 * lag_s:4.1f} / {1e3 * late_s:<4.1f}"
          f"{1e3 * LAG_LIMIT_S:8.0f}")  # fmt: skip
    print(f"{f'peak memory of following {MANY} hosts, MB':44} {peak / 1e6:10.0f} {PEAK_LIMIT_BYTES / 1e6:8.0f}")
    print(f"{'log that is copied and shown, MB/s a core':44} {rate / 1e6:10.0f} {RATE_LIMIT / 1e6:8.0f}")
    print(f"{f'upload of a bundle to {HOSTS} hosts, s':44} {put_s:10.2f}")
    print(f"{f'preflight of {MANY} hosts: s / of the client / MB':44} {asked_s:.1f} / {own_s:.1f} / {asking / 1e6:.0f}")
    broken = ratio > RATIO_LIMIT or lag_s > LAG_LIMIT_S or peak > PEAK_LIMIT_BYTES or rate < RATE_LIMIT
    return int(broken and options.check)


if __name__ == "__main__":
    sys.exit(main())
