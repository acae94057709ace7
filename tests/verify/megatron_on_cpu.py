"""LLaMA-Factory's Megatron trainer on processes without GPUs, over Gloo: LLaMA-Factory, mcore_adapter and megatron-core
as they are installed, with what they ask of CUDA answered by the CPU.

Run as a program (`python -m tests.verify.megatron_on_cpu`, USE_MCA=1) it imports the trainer once, which is most of the
time of so small a run. Each line of JSON on its standard input is a train.yaml to train, a number of processes and
whether what these send stays in memory (`Send.keeps`); torchrun's own agent then forks them, and a line on its standard
output says how they ended.

What differs from a GPU, and why it does not matter to what is tested here:

- `transformer_impl: local`, for Transformer Engine wants a GPU: other kernels, the same parameters but for their names.
- Norms are bf16, as Transformer Engine's are; the local ones are fp32 else. Gloo's coalesced all-gather of a bf16 and
  an fp32 tensor gives wrong values without an error, and the distributed optimizer does one with every model chunk from
  the second on that has both (`core/distributed/param_and_grad_buffer.py`, start_param_sync). NCCL does it right.
- Adam is the class below, which keeps its steps where Transformer Engine's does.
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
"""Of a run, and of a message between its processes: far above what anything here takes."""


class OnTheCpu(TorchFunctionMode):
    """Functions of torch that are called for a CUDA device do their work on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {key: _device(value) if key == "device" else value for key, value in (kwargs or {}).items()}
        kwargs.pop("pin_memory", None)  # asks for the driver
        found = func(*map(_device, args), **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # megatron-core knows by this name which parameters to keep fp32 copies of.
            return found.replace("torch.", "torch.cuda.")
        return found


def _device(value: Any) -> Any:
    is_cuda = isinstance(value, str | torch.device) and str(value).split(":")[0] == "cuda"
    return CPU if is_cuda else value


class Stream:
    """A stream or an event: on the CPU everything has happened when the call returns."""

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
    """Before megatron-core is imported: some of it asks when it is imported."""

    @contextlib.contextmanager
    def on_a_stream(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    cuda = torch.cuda
    for module, name in (
        *((cuda, name) for name in ("set_device", "synchronize", "empty_cache")),
        *((cuda.nvtx, name) for name in ("range_push", "range_pop")),
    ):
        setattr(module, name, lambda *args, **kwargs: None)  # one each: torch._dynamo has a table of them
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

    torch's counts those of each parameter, and with that megatron-core can save a checkpoint but not go on from it
    (`core/optimizer/distrib_optimizer.py`, state_dict wants the number of steps before there is one).
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
    """While megatron-core looks for optimizers of its liking; nothing else of Apex is there."""
    apex, optimizers = types.ModuleType("apex"), types.ModuleType("apex.optimizers")
    optimizers.FusedAdam, optimizers.FusedSGD = FusedAdam, torch.optim.SGD
    modules = {module.__name__: module for module in (apex, optimizers)}
    sys.modules |= modules
    import megatron.core.optimizer

    for name in modules:
        del sys.modules[name]
    assert megatron.core.optimizer.Adam is FusedAdam


class Send:
    """A send in flight between stages of an interleaved pipeline. Until it has been waited for nobody may free what is
    sent.

    megatron-core below 0.18 does (Megatron-LM PR 4047). PyTorch may keep such memory from being used again, on GPUs
    with a record of the tensors in flight; Gloo does not.
    """

    keeps = False
    """Whether what is sent stays in memory whoever frees it."""
    freed = 0
    """How many tensors of this process were freed too early."""

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
        moe_utils.te_general_gemm = None  # megatron-core 0.16 forgets it where Transformer Engine is not installed

    exchange = torch.distributed.all_to_all_single

    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        # From a GPU the sizes come as NumPy arrays, from the CPU as they are: tensors (moe_utils.py,
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
        # The local norm refuses sequence parallelism. All that it takes is that the gradients of the ranks are summed.
        made.weight.sequence_parallel = config.sequence_parallel
        return made

    WrappedTorchNorm.__new__ = norm


def answer_for_the_adapter() -> None:
    import mcore_adapter.utils
    from mcore_adapter.platforms import current_platform
    from mcore_adapter.trainer import McaTrainer

    # The names of the weights of local layers, whose norms are modules of their own.
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
    """What this rank holds after an optimizer step, of which it tells the number: elements, and bytes of the rest.

    `freed_in_flight` is how often it freed what it was still sending to the next stage until then.
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
    """In each of the processes: what `python -m llamafactory.launcher train.yaml` does."""
    import faulthandler

    from llamafactory.train.tuner import run_exp

    faulthandler.dump_traceback_later(limit_s, exit=True)
    os.environ["REPORTS"] = reports
    Send.keeps = keeps_sent
    sys.argv = ["launcher", path]
    with OnTheCpu():
        run_exp()


def start(request: Mapping[str, Any]) -> str:
    """Train one file; the traceback of the rank that failed first, or nothing."""
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
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is imported says much there
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
