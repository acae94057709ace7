"""LLaMA-Factory's Megatron trainer in processes without GPUs, over Gloo: the installed LLaMA-Factory, mcore_adapter and
megatron-core, with their calls to CUDA answered by the CPU.

As a program (`python -m tests.verify.megatron_on_cpu`, USE_MCA=1), it imports the trainer once, which takes most of the
time of such small runs. Each line of JSON on its standard input holds a train.yaml, a number of processes, and whether
sent tensors stay in memory (`Send.keeps`). torchrun's own agent then forks the processes, and a line on standard output
reports how they ended.

The differences from a GPU, and why they do not affect what is tested here:

- `transformer_impl: local`, because Transformer Engine needs a GPU: other kernels, but the same parameters except for
  their names.
- Norms are bf16, as in Transformer Engine; the local ones would be fp32. Gloo's coalesced all-gather of a bf16 and an
  fp32 tensor gives wrong values without an error, and the distributed optimizer performs one for every model chunk from
  the second on that has both (`core/distributed/param_and_grad_buffer.py`, start_param_sync). NCCL does it correctly.
- Adam is the class below, which counts its steps where Transformer Engine's does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
LIMIT_S = 300
"""Time limit of a run, and of a message between its processes: far more than any run here takes."""


class OnTheCpu(TorchFunctionMode):
    """Runs torch functions that are called for a CUDA device on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {key: _device(value) if key == "device" else value for key, value in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)  # queries the driver
        found = func(*map(_device, args), **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # megatron-core tells by this name which parameters need fp32 copies.
            return found.replace("torch.", "torch.cuda.")
        return found


def _device(value: Any) -> Any:
    is_cuda = isinstance(value, str | torch.device) and str(value).split(":")[0] == "cuda"
    return CPU if is_cuda else value


class Stream:
    """A stream or an event: on the CPU, all work is done when the call returns."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = synchronize = record = wait = nothing

    def record_event(self, event: Any = None) -> Stream:
        return event or Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def answer_for_cuda() -> None:
    """Patch torch.cuda. Must run before megatron-core is imported, because parts of it query CUDA on import."""

    @contextlib.contextmanager
    def on_a_stream(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    cuda = torch.cuda
    for module, name in (
        *((cuda, name) for name in ("set_device", "synchronize", "empty_cache")),
        *((cuda.nvtx, name) for name in ("range_push", "range_pop")),
    ):
        setattr(module, name, lambda *args, **kwargs: None)  # separate functions: torch._dynamo has a table of them
    cuda.current_device = lambda: CPU
    cuda.current_stream = lambda device=None: Stream()
    cuda.default_stream = lambda device=None: Stream()
    cuda.Stream = cuda.Event = Stream
    cuda.stream = on_a_stream
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.get_device_capability = lambda *args, **kwargs: (9, 0)


class FusedAdam(torch.optim.Optimizer):
    """AdamW that counts the steps of a group, as Apex and Transformer Engine do.

    torch's AdamW counts the steps of each parameter; megatron-core can then save a checkpoint but not resume from it
    (`core/optimizer/distrib_optimizer.py`: state_dict needs the number of steps before there is one).
    """

    def __init__(self, params: Any, *, adam_w_mode: bool, lr: float, **keys: Any) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, **keys})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            first, second = group["betas"]
            for weight in group["params"]:
                if not self.state[weight]:
                    self.state[weight] |= {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
                mean, square = (self.state[weight][key] for key in ("exp_avg", "exp_avg_sq"))
                mean.lerp_(weight.grad, 1 - first)
                square.mul_(second).addcmul_(weight.grad, weight.grad, value=1 - second)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                size = (square / (1 - second**step)).sqrt_().add_(group["eps"])
                weight.addcdiv_(mean, size, value=-group["lr"] / (1 - first**step))


def answer_for_apex() -> None:
    """Provide the optimizer that megatron-core looks for in Apex, and nothing else of Apex."""
    apex, optimizers = types.ModuleType("apex"), types.ModuleType("apex.optimizers")
    optimizers.FusedAdam, optimizers.FusedSGD = FusedAdam, torch.optim.SGD
    modules = {module.__name__: module for module in (apex, optimizers)}
    sys.modules |= modules
    import megatron.core.optimizer

    for name in modules:
        del sys.modules[name]
    assert megatron.core.optimizer.Adam is FusedAdam


class Send:
    """A send in flight between stages of an interleaved pipeline. The sent tensor must not be freed before it has been
    waited for.

    megatron-core below 0.18 does free it (Megatron-LM PR 4047). On GPUs, PyTorch's record of tensors in flight may
    prevent such memory from being reused; Gloo has no such record.
    """

    keeps = False
    """Whether sent tensors stay in memory even if they are freed."""
    freed = 0
    """Number of this process's tensors that were freed too early."""

    def __init__(self, work: Any, tensor: torch.Tensor) -> None:
        self.work, self.tensor, self.address = work, tensor, tensor.data_ptr()
        self.memory = tensor.untyped_storage() if Send.keeps else None

    def wait(self) -> None:
        Send.freed += self.tensor.data_ptr() != self.address
        self.work.wait()


def watch_sends() -> None:
    from megatron.core.pipeline_parallel import p2p_communication

    start = p2p_communication._p2p_ops

    def _p2p_ops(**tensors: Any) -> dict[str, Any]:
        return {
            name: Send(work, tensors[f"tensor_{name}"]) if name.startswith("send_") else work
            for name, work in start(**tensors).items()
        }

    p2p_communication._p2p_ops = _p2p_ops


def answer_for_megatron() -> None:
    import megatron.core.tensor_parallel.random as generators
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # megatron-core 0.16 omits it if Transformer Engine is not installed

    exchange = torch.distributed.all_to_all_single

    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        # From a GPU the sizes come as NumPy arrays, from the CPU as tensors (moe_utils.py,
        # maybe_move_tensor_to_cpu).
        sizes = [
            None if one is None else [int(size) for size in one] for one in (output_split_sizes, input_split_sizes)
        ]
        return exchange(output, input, *sizes, **kwargs)

    torch.distributed.all_to_all_single = all_to_all_single
    generators._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    generators._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> torch.nn.Module:
        made = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        # The local norm refuses sequence parallelism, which only requires that the gradients of the ranks are summed.
        made.weight.sequence_parallel = config.sequence_parallel
        return made

    WrappedTorchNorm.__new__ = norm


def answer_for_the_adapter() -> None:
    import mcore_adapter.utils
    from mcore_adapter.platforms import current_platform
    from mcore_adapter.trainer import McaTrainer

    # The names of the weights of local layers, whose norms are separate modules.
    mcore_adapter.utils.is_megatron_llama.cached_value = True
    platform = type(current_platform)
    platform.get_rng_state = staticmethod(torch.cuda.get_rng_state)
    platform.set_rng_state = staticmethod(torch.cuda.set_rng_state)

    train = McaTrainer.training_step

    def training_step(self: Any, *args: Any) -> Any:
        done = train(self, *args)
        path = Path(os.environ["REPORTS"], os.environ["RANK"] + ".json")
        if not path.exists():
            path.write_text(json.dumps(held_by(self)), encoding="utf-8")
        return done

    McaTrainer.training_step = training_step


def held_by(trainer: Any) -> dict[str, int]:
    """Return what this rank holds after an optimizer step: counts of elements, bytes, and the number of the step.

    `freed_in_flight` counts the tensors that it had freed until then while still sending them to the next stage.
    """
    from megatron.core import mpu

    def size(tensors: Any) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    weights = [parameter for chunk in trainer.models_wrapped for parameter in chunk.parameters()]
    buffers = [one for chunk in trainer.models_wrapped for one in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    optimizers = [one.optimizer for one in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])]
    updated = [weight for one in optimizers for group in one.param_groups for weight in group["params"]]
    moments = [
        value
        for one in optimizers
        for state in one.state.values()
        for value in state.values()
        if torch.is_tensor(value) and value.numel() > 1
    ]
    return {
        "step": trainer.state.global_step,
        "stage": mpu.get_pipeline_model_parallel_rank(),
        "parameters": sum(weight.numel() for weight in weights),
        "weights": size(weights),
        "gradients": size(buffer.grad_data for buffer in buffers),
        "optimizer": size(updated) + size(moments),
        "freed_in_flight": Send.freed,
    }


def train(path: str, reports: str, keeps_sent: bool, limit_s: int) -> None:
    """Do what `python -m llamafactory.launcher train.yaml` does, in each of the processes."""
    import faulthandler

    from llamafactory.train.tuner import run_exp

    faulthandler.dump_traceback_later(limit_s, exit=True)
    os.environ["REPORTS"] = reports
    Send.keeps = keeps_sent
    sys.argv = ["launcher", path]
    with OnTheCpu():
        run_exp()


def start(request: Mapping[str, Any]) -> str:
    """Train one file; return the traceback of the rank that failed first, or an empty text."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=request["processes"],
        run_id=Path(request["folder"]).name,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="fork",
        logs_specs=DefaultLogsSpecs(log_dir=request["folder"], redirects=Std.ALL),
    )
    try:
        elastic_launch(config, train)(request["train_yaml"], request["folder"], request["keeps_sent"], LIMIT_S)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        return str(first.message["message"] if isinstance(first.message, dict) else first.message) + "\n" + str(failed)
    except Exception:
        return traceback.format_exc()
    return ""


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the imported packages write much there
    torch.set_num_threads(1)
    answer_for_cuda()
    answer_for_apex()
    answer_for_megatron()
    watch_sends()
    answer_for_the_adapter()
    import llamafactory.train.tuner  # noqa: F401  before the forks

    for line in sys.stdin:
        print(json.dumps({"error": start(json.loads(line))}), file=answers, flush=True)


if __name__ == "__main__":
    main()
