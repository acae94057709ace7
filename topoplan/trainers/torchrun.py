"""How most trainers start: one torchrun per node.

The rendezvous is static, which keeps the planned node ranks (c10d sorts nodes by address).
"""

from __future__ import annotations

from topoplan.specs.spec import Spec


def torchrun_command(spec: Spec, node: int, words: str) -> str:
    """Return the last command of a node's script: one process per GPU that runs `words`, which are quoted for bash."""
    cluster = spec.cluster
    return f"""\
exec "$python" -m torch.distributed.run \\
  --nnodes {cluster.nodes} --node_rank {node} --nproc_per_node {cluster.gpus_per_node} \\
  --master_addr "$master_addr" --master_port "$master_port" \\
  --max_restarts 0 --log_dir "$log_dir" --tee 3 \\
  {words}
"""
