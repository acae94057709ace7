"""Follows the logs of hosts as a launch does, into copies and a file of lines, and says what that took.

Standard input: how to reach the hosts, and the directories of their runs.
"""

import json
import os
import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout

from topoplan.cli.live_output import EventOutput
from topoplan.remote.fanout import connect_all
from topoplan.remote.identities import Access
from topoplan.remote.ssh_config import Target
from topoplan.run.watch import Watch
from topoplan.run.watched import WatchedNode

given = json.load(sys.stdin)
paths = {"identity_files", "user_known_hosts_files"}
targets = {
    one["name"]: Target(**{key: tuple(map(Path, value)) if key in paths else value for key, value in one.items()})
    for one in given["targets"]
}
connections = connect_all(targets, Access(), deadline_s=60)
before = resource.getrusage(resource.RUSAGE_SELF)
with tempfile.TemporaryDirectory() as folder, (Path(folder) / "shown").open("w") as sys.stdout:
    output = EventOutput(None)
    nodes = [
        WatchedNode(
            node=node, name=name, address=name, run_dir=given["run_dirs"][name], connection=one, log=Path(folder) / name
        )
        for node, (name, one) in enumerate(connections.items())
    ]
    watch = Watch(nodes, tell=output.tell, reconnect=None)
    watch.until(lambda: False)
    watch.close()
    output._output.close(60)
used = resource.getrusage(resource.RUSAGE_SELF)
found = {
    "bytes": sum(node.offset for node in nodes),
    "cpu_s": used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime,
    "peak_bytes": used.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
}
print(json.dumps(found), file=sys.__stdout__)
os._exit(0)
