"""Compare pipeline layout strings and stages with megatron-core's PipelineParallelLayerLayout and its even split."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.verify.megatron import stages_by_megatron
from topoplan.errors import LayoutError
from topoplan.layout.stages import balanced_pipeline_layout, parse_pipeline_layout, split_stages, vpp_of

pytestmark = pytest.mark.verify

LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
REASON = "megatron-core is not installed (the verify extra has it)"


@pytest.fixture(scope="module")
def megatron() -> Any:
    return pytest.importorskip(
        "megatron.core.transformer.pipeline_parallel_layer_layout", reason=REASON
    ).PipelineParallelLayerLayout


def random_string(rng: random.Random) -> str:
    """Return a random layout string: mostly valid, sometimes not."""
    # No digits in repeated parts: "(t*3)*9" would be read as one count.
    alphabet = rng.choice(["tE|L", "t|", "tm|L,", "t|*", "t()|*,EL"])
    pieces = []
    for _ in range(rng.randint(1, 8)):
        piece = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 4)))
        if rng.random() < 0.4:
            piece = f"({piece})*{rng.randint(0, 4)}"
        elif rng.random() < 0.4:
            piece += f"*{rng.randint(0, 12)}"
        pieces.append(piece)
    text = "".join(pieces)
    return f"E{text}L" if rng.random() < 0.5 else text


def parsed_by_megatron(megatron: Any, text: str) -> list[str] | None:
    try:
        return ["".join(LETTERS[layer.name] for layer in stage) for stage in megatron.parse_str_to_list(text)]
    except AssertionError:
        return None


def parsed_here(text: str) -> list[str] | None:
    try:
        return parse_pipeline_layout(text)
    except LayoutError:
        return None


def test_strings_are_read_as_megatron_reads_them(megatron: Any) -> None:
    rng = random.Random(7)
    told = [
        "Et*3|(tt|)*29,m|L",
        "Et*4 | t L",
        "((t)*2)*3L",
        "E(t|t)*2*3L",
        "Et*2*3|L",
        "**3",
        "|*3",
        "",
        "E,,t|L",
        "t*2*3",
    ]
    texts = told + [random_string(rng) for _ in range(20_000)]
    read = 0
    for text in texts:
        theirs = parsed_by_megatron(megatron, text)
        assert parsed_here(text) == theirs, text
        read += theirs is not None
    assert read > 2000


def stages_here(text: str, pp: int, layers: int, mtp_layers: int = 0) -> list[list[list[int]]] | None:
    try:
        stages = split_stages(layers, pp, vpp_of(text, pp), text, mtp_layers)
        return [[list(chunk.layers) for chunk in rank] for rank in stages]
    except LayoutError:
        return None


def test_stages_hold_the_layers_that_megatron_gives_them(megatron: Any) -> None:
    rng = random.Random(8)
    accepted = 0
    for _ in range(3000):
        pp, vpp = rng.randint(1, 8), rng.randint(1, 4)
        sizes = [rng.randint(0, 5) for _ in range(pp * vpp)]
        text = "E" + "|".join("t" * n if n < 3 else f"t*{n}" for n in sizes) + "L"
        if rng.random() < 0.2:
            text = text.replace("t", "m", 1) if rng.random() < 0.5 else text.replace("|", "", 1)
        layers = sum(sizes) + rng.choice([0, 0, 0, 1])
        if not layers:
            continue
        theirs = stages_by_megatron(megatron, text, pp, layers)
        assert stages_here(text, pp, layers) == theirs, (text, pp, layers)
        accepted += theirs is not None
    assert accepted > 1000


def test_token_prediction_may_stand_where_megatron_lets_it(megatron: Any) -> None:
    rng = random.Random(9)
    accepted = refused = 0
    for _ in range(4000):
        pp, vpp, mtp_layers = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 3)
        parts = ["t" * rng.randint(0, 3) for _ in range(pp * vpp)]
        layers = sum(map(len, parts))
        if not layers:
            continue
        last = max(index for index, part in enumerate(parts) if part)
        where = rng.choice([last, len(parts) - 1, rng.randrange(len(parts))])
        parts[where] += "m" * mtp_layers
        if rng.random() < 0.2:
            where = rng.randrange(len(parts))
            parts[where] = rng.choice(["m", "tm", "mt"]) + parts[where]
            layers += rng.randint(0, 1)
        text = "E" + "|".join(parts) + "L"
        theirs = stages_by_megatron(megatron, text, pp, layers, mtp_layers)
        assert stages_here(text, pp, layers, mtp_layers) == theirs, (text, pp, layers, mtp_layers)
        accepted += theirs is not None
        refused += theirs is None
    assert min(accepted, refused) > 500


def test_balanced_strings_are_accepted(megatron: Any) -> None:
    written = 0
    for layers in range(1, 130):
        for pp in (2, 3, 4, 5, 6, 8, 12, 16, 32):
            for vpp in (1, 2, 3):
                for mtp_layers in (0, 1):
                    if text := balanced_pipeline_layout(layers, pp, vpp, mtp_layers):
                        written += 1
                        theirs = stages_by_megatron(megatron, text, pp, layers, mtp_layers)
                        assert theirs is not None
                        assert theirs == stages_here(text, pp, layers, mtp_layers), text
    assert written > 1500


def test_an_even_split_is_that_of_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    block = pytest.importorskip("megatron.core.transformer.transformer_block", reason=REASON)
    layer = pytest.importorskip("megatron.core.transformer.transformer_layer", reason=REASON)
    for pp in (1, 2, 4, 8):
        for vpp in (1, 2, 3):
            if pp == 1 < vpp:
                continue
            config = SimpleNamespace(
                num_layers=24 * 8,
                pipeline_model_parallel_size=pp,
                virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
                pipeline_model_parallel_layout=None,
                num_layers_in_first_pipeline_stage=None,
                num_layers_in_last_pipeline_stage=None,
                account_for_embedding_in_pipeline_split=False,
                account_for_loss_in_pipeline_split=False,
            )
            for rank, chunks in enumerate(split_stages(config.num_layers, pp, vpp, None)):
                for virtual, chunk in enumerate(chunks):
                    stage = virtual if vpp > 1 else None
                    built = block.get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
                    offset = layer.get_transformer_layer_offset(config, vp_stage=stage, pp_rank=rank)
                    assert list(chunk.layers) == list(range(offset, offset + built))
