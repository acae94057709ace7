"""Print the adapters that mcore_bridge builds, as JSON. Run by test_adapters_against_mcore_bridge.py.

Applies the real LoraParallelLinear to stand-ins for the layers of Transformer Engine, which has no CPU build. A
stand-in holds a rank's share of the weight and saves for backward what the real layer saves: the input if the weight is
trained, and the norm's output if it is trained or returned (`pytorch/module/layernorm_linear.py`, ln_out_to_save).
"""

import json
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import peft.tuners.lora.te  # noqa: F401  (asks for Transformer Engine's specification, before there is a stand-in)
import torch
import transformers.utils  # noqa: F401
from megatron.core import parallel_state
from megatron.core.extensions import transformer_engine as extensions


class Product(torch.autograd.Function):
    """x W^T, which saves x only if the weight is trained."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        return gradient @ weight, None if x is None else gradient.t() @ x


class NormAndProduct(torch.autograd.Function):
    """A product behind a norm (here a doubling), whose output is returned too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = 2 * x
        ctx.save_for_backward(x, normed, weight)
        return normed @ weight.t(), normed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        _, _, weight = ctx.saved_tensors
        return 2 * (gradients[0] @ weight + gradients[1]), None


class TELinear(torch.nn.Module):
    """A linear layer given by the sizes of the whole model, with the weight of one of `tp` ranks."""

    tp = 1
    side = "duplicated"

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__()
        side = others.get("parallel_mode", self.side)
        self.config, self.parallel_mode = config, None if side == "duplicated" else side
        self.is_expert, self.tp_group = others.get("is_expert", False), None
        parts = 1 if self.is_expert else self.tp
        self.in_features = input_size // parts if side == "row" else input_size
        self.out_features = output_size // parts if side == "column" else output_size
        self.weight = torch.nn.Parameter(torch.empty(self.out_features, self.in_features))
        self.weight.tensor_model_parallel = side != "duplicated"  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[Any, None]:
        return Product.apply(x, self.weight), None  # type: ignore[no-untyped-call]


class TEColumnParallelLinear(TELinear):
    side = "column"


class TELayerNormColumnParallelLinear(TEColumnParallelLinear):
    return_layernorm_output = False

    def forward(self, x: torch.Tensor) -> tuple[Any, None]:
        assert self.return_layernorm_output
        return NormAndProduct.apply(x, self.weight), None  # type: ignore[no-untyped-call]


class TERowParallelLinear(TELinear):
    side = "row"


class TEGroupedLinear(torch.nn.Module):
    """One weight for each of `num_gemms` experts, which tensor parallelism does not split."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        super().__init__()
        self.config, self.num_gemms, self.is_expert, self.parallel_mode = config, num_gemms, True, None
        self.in_features, self.out_features = input_size, output_size
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.empty(output_size, input_size)))

    def forward(self, x: torch.Tensor, splits: list[int]) -> tuple[Any, None]:
        parts = [
            Product.apply(part, getattr(self, f"weight{number}"))  # type: ignore[no-untyped-call]
            for number, part in enumerate(x.split(splits))
        ]
        return torch.cat(parts), None


class TEColumnParallelGroupedLinear(TEGroupedLinear):
    pass


class TERowParallelGroupedLinear(TEGroupedLinear):
    pass


STAND_INS = (TELinear, TEColumnParallelLinear, TELayerNormColumnParallelLinear, TERowParallelLinear)
STAND_INS_OF_EXPERTS = (TEGroupedLinear, TEColumnParallelGroupedLinear, TERowParallelGroupedLinear)


def bridge_adapter() -> Any:
    """Import LoraParallelLinear without the rest of its package, which needs Transformer Engine."""
    for one in (*STAND_INS, *STAND_INS_OF_EXPERTS):
        setattr(extensions, one.__name__, one)
    sys.modules["transformer_engine"] = ModuleType("transformer_engine")
    found = find_spec("mcore_bridge")
    (root,) = found.submodule_search_locations or ()
    for name, path in (("mcore_bridge", root), ("mcore_bridge.tuners", f"{root}/tuners")):
        package = ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package
    utils = ModuleType("mcore_bridge.utils")
    utils.get_current_device = lambda: "cpu"  # type: ignore[attr-defined]
    sys.modules["mcore_bridge.utils"] = utils
    from mcore_bridge.tuners import lora

    parallel_state.get_expert_tensor_parallel_world_size = lambda: 1
    lora.get_expert_tensor_parallel_world_size = lambda: 1
    lora.get_tensor_model_parallel_world_size = lambda: TELinear.tp
    return lora.LoraParallelLinear


def adapter(build: Any, asked: dict[str, Any]) -> dict[str, int]:
    """Return the elements of A and of B on a rank, and of the gradients summed over its tensor-parallel group."""
    TELinear.tp = asked["tp"]
    config = SimpleNamespace(init_method=None, sequence_parallel=asked["tp"] > 1)
    classes = {one.__name__: one for one in (*STAND_INS, *STAND_INS_OF_EXPERTS)}
    base, sides = classes[asked["base"]], (asked["inputs"], asked["outputs"])
    layer = base(asked["experts"], *sides, config=config) if asked["experts"] else base(*sides, config=config)
    found = build(base_layer=layer, adapter_name="default", r=asked["rank"], lora_alpha=32, lora_dropout=0.05)
    a, b = ([*factor["default"].parameters()] for factor in (found.lora_A, found.lora_B))
    return {
        "saved": saved_bytes(found, asked["rows"]) if asked["rows"] else 0,
        "a": sum(weight.numel() for weight in a),
        "b": sum(weight.numel() for weight in b),
        "summed": sum(weight.numel() for weight in (*a, *b) if getattr(weight, "sequence_parallel", False)),
    }


def saved_bytes(layer: Any, rows: int) -> int:
    """Return the bytes that autograd saves in a forward pass, without weights and a norm's input; each storage once."""
    layer.bfloat16().train()
    layer.base_layer.requires_grad_(False)
    x = torch.ones(rows, layer.base_layer.in_features, dtype=torch.bfloat16, requires_grad=True)
    grouped = isinstance(layer.base_layer, TEGroupedLinear)
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        splits = [[rows // layer.base_layer.num_gemms] * layer.base_layer.num_gemms] if grouped else []
        result = layer(x, *splits)
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    if isinstance(layer.base_layer, TELayerNormColumnParallelLinear):
        weights.add(x.untyped_storage().data_ptr())
    found = sum(size for storage, size in kept.items() if storage not in weights)
    result[0].sum().backward()
    assert x.grad is not None
    return found


def dropout(layer: torch.nn.Dropout, x: torch.Tensor) -> torch.Tensor:
    """Dropout as torch runs it on a GPU: one kernel, and a mask of one byte per element."""
    return torch.native_dropout(x, layer.p, layer.training)[0]


if __name__ == "__main__":
    torch.nn.Dropout.forward = dropout  # type: ignore[method-assign,assignment]
    builder = bridge_adapter()
    print(json.dumps([adapter(builder, asked) for asked in json.loads(sys.stdin.read())]))
