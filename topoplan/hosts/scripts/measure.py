"""Time the GPUs of this host and the links between hosts: matrix products, attention, copies and collectives.

Standard input is one line of JSON with the task, and then stays open until the requester is gone, which ends all ranks.
The first process of a host starts one process for each GPU, which is this program again. Global rank 0 writes a line of
JSON for each measurement. Needs torch; on request, it times CPUs and Gloo.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

Task = dict[str, Any]
Job = Callable[[], object]
ROUND_S = 0.1
SPARE_S = 30.0


def say(**document: Any) -> None:
    """Print a line of JSON."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def start(program: str, task: Task) -> int:
    """Start one process per GPU; return an exit code. They end with the first that fails, stdin, or the limit."""
    try:
        import torch
    except ImportError as error:
        say(error=f"no torch in {sys.executable}: {error}")
        return 0
    ranks = task["gpus"] if task["cpu"] else torch.cuda.device_count()
    if ranks != task["gpus"]:
        say(error=f"torch sees {ranks} GPUs, and the spec has {task['gpus']}")
        return 0
    own = dict(os.environ, **task["environment"])
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, "rank", json.dumps(dict(task, local=local))],
            env=own,
            stdin=subprocess.DEVNULL,
        )
        for local in range(ranks)
    ]

    def end() -> None:
        for child in children:
            child.kill()

    def watch() -> None:
        sys.stdin.read()
        end()

    threading.Thread(target=watch, daemon=True).start()
    end_at = time.monotonic() + task["limit_s"] + 2 * SPARE_S
    while any(child.poll() is None for child in children):
        if time.monotonic() > end_at or any(child.returncode for child in children):
            end()
        time.sleep(0.05)
    return max(abs(child.wait()) for child in children)


class Rank:
    """One of all processes."""

    def __init__(self, task: Task) -> None:
        """Join the process group."""
        import torch
        import torch.distributed as dist

        self.torch: Any = torch
        self.dist: Any = dist
        self.task, self.gpus = task, task["gpus"]
        self.rank, self.world = task["node"] * self.gpus + task["local"], self.gpus * task["nodes"]
        self.is_cuda = not task["cpu"]
        self.device: Any = torch.device("cuda", task["local"]) if self.is_cuda else torch.device("cpu")
        if self.is_cuda:
            torch.cuda.set_device(self.device)
        address = f"tcp://{task['master']}:{task['port']}"
        backend = "nccl" if self.is_cuda else "gloo"
        dist.init_process_group(backend, init_method=address, rank=self.rank, world_size=self.world)
        self.end_at = time.monotonic() + task["limit_s"]

    def sync(self) -> None:
        """Wait for pending GPU work."""
        if self.is_cuda:
            self.torch.cuda.synchronize()

    def timed(self, job: Job, loops: int) -> float:
        """Return the median seconds over several rounds, after a warm-up round."""
        rounds = []
        for _ in range(self.task["rounds"] + 1):
            self.sync()
            begun = time.perf_counter()
            for _ in range(loops):
                job()
            self.sync()
            rounds.append((time.perf_counter() - begun) / loops)
        return statistics.median(rounds[1:])

    def most(self, value: float) -> float:
        """Return the largest value of any rank."""
        found = self.torch.tensor([value], device=self.device)
        self.dist.all_reduce(found, op=self.dist.ReduceOp.MAX)
        return float(found.item())

    def tell(self, kind: str, job: Job, **facts: int) -> None:
        """Time a job on all ranks concurrently; rank 0 reports the median over the ranks and the slowest one."""
        if self.most(float(time.monotonic() > self.end_at)):
            return
        loops = max(1, min(1000, int(ROUND_S / self.most(max(1e-6, self.timed(job, 1))))))
        own = self.torch.tensor([self.timed(job, loops)], device=self.device)
        every = [self.torch.zeros_like(own) for _ in range(self.world)]
        self.dist.all_gather(every, own)
        seconds = sorted(one.item() for one in every)
        if self.rank == 0:
            say(kind=kind, seconds=statistics.median(seconds), slowest_s=seconds[-1], **facts)

    def make(self, *shape: int) -> Any:
        """Return random values in the data type that most models are trained in."""
        dtype = self.torch.bfloat16 if self.is_cuda else self.torch.float32
        return self.torch.randn(*shape, device=self.device, dtype=dtype)

    def kernels(self) -> None:
        """Time what a GPU does by itself, on all GPUs concurrently, as in training."""
        torch, make = self.torch, self.make
        for rows, columns, inner in self.task["products"]:
            job = partial(torch.matmul, make(rows, inner), make(inner, columns))
            self.tell("matmul", job, rows=rows, columns=columns, inner=inner)
        attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
        for heads, tokens, width in self.task["attention"]:
            inputs = [make(1, heads, tokens, width).requires_grad_() for _ in range(3)]
            gradient = make(1, heads, tokens, width)

            def both(inputs: Any = inputs, gradient: Any = gradient) -> object:
                return torch.autograd.grad(attend(*inputs), inputs, gradient)

            facts = {"heads": heads, "tokens": tokens, "width": width}
            self.tell("attention", partial(attend, *(one.detach() for one in inputs)), **facts)
            self.tell("attention with gradients", both, **facts)
        for size in self.task["copies"]:
            source = torch.zeros(size // 4, device=self.device)
            self.tell("copy", partial(torch.empty_like(source).copy_, source), bytes=size)

    def collectives(self) -> None:
        """Time collectives, with all groups of a kind active concurrently, as in training."""
        torch, dist = self.torch, self.dist
        for size, stride in self.task["groups"]:
            firsts = [block + shift for block in range(0, self.world, size * stride) for shift in range(stride)]
            members = [[first + stride * place for place in range(size)] for first in firsts]
            groups = [dist.new_group(ranks) for ranks in members]
            group = groups[[self.rank in ranks for ranks in members].index(True)]
            for count in self.task["messages"]:
                whole = torch.zeros(count // 4 // size * size, device=self.device)
                part, other = torch.zeros(len(whole) // size, device=self.device), torch.zeros_like(whole)
                facts = {"size": size, "stride": stride, "bytes": 4 * len(whole)}
                self.tell("all-reduce", partial(dist.all_reduce, whole, group=group), **facts)
                self.tell("all-gather", partial(dist.all_gather_into_tensor, whole, part, group=group), **facts)
                self.tell("all-to-all", partial(dist.all_to_all_single, other, whole, group=group), **facts)

    def about(self) -> None:
        """Report what was measured on, and the GPU clocks after work."""
        said: Task = {"gpu": "", "gpus": self.gpus, "nodes": self.task["nodes"], "torch": self.torch.__version__}
        if self.is_cuda:
            version = self.torch.version
            said["gpu"] = self.torch.cuda.get_device_name(self.device)
            said["cuda"] = version.cuda or version.hip or ""
            said["nccl"] = ".".join(str(part) for part in self.torch.cuda.nccl.version())
            query = "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit"
            try:
                told = subprocess.check_output(["nvidia-smi", query, "--format=csv,noheader,nounits"], timeout=20)
                said["driver_clock_most_clock_power_limit"] = sorted(
                    {one.strip() for one in told.decode().splitlines()}
                )
            except (OSError, subprocess.SubprocessError):
                pass  # from another vendor
        if self.rank == 0:
            say(about=said)


def run(task: Task) -> None:
    """Run as one rank."""
    rank = Rank(task)
    rank.kernels()
    rank.about()
    rank.collectives()
    rank.dist.barrier()
    rank.dist.destroy_process_group()


if sys.argv[1] == "rank":
    run(json.loads(sys.argv[2]))
else:
    sys.exit(start(sys.argv[1], json.loads(sys.stdin.readline())))
