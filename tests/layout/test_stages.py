import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan.errors import LayoutError
from topoplan.layout.stages import (
    balanced_pipeline_layout,
    parse_pipeline_layout,
    sized_pipeline_layout,
    split_stages,
    vpp_of,
)
from topoplan.specs.layout_parts import StageSizes

COUNTS = st.integers(1, 12)


@given(per_stage=COUNTS, pp=COUNTS, vpp=COUNTS)
def test_an_even_split_covers_all_layers_once_in_the_order_of_virtual_stages(per_stage: int, pp: int, vpp: int) -> None:
    layers = per_stage * pp * vpp
    stages = split_stages(layers, pp, vpp, None)
    assert [len(chunks) for chunks in stages] == [vpp] * pp
    in_order = [stages[rank][virtual] for virtual in range(vpp) for rank in range(pp)]
    assert [layer for chunk in in_order for layer in chunk.layers] == list(range(layers))
    assert {chunk.num_layers for chunk in in_order} == {per_stage}


@given(pp=COUNTS, vpp=COUNTS, sizes=st.data())
def test_an_uneven_split_covers_all_layers_once(pp: int, vpp: int, sizes: st.DataObject) -> None:
    counts = sizes.draw(st.lists(st.integers(0, 5), min_size=pp * vpp, max_size=pp * vpp))
    parts = ["t" * count for count in counts]
    stages = split_stages(sum(counts), pp, vpp, "E" + "|".join(parts) + "L")
    in_order = [stages[rank][virtual] for virtual in range(vpp) for rank in range(pp)]
    assert [layer for chunk in in_order for layer in chunk.layers] == list(range(sum(counts)))
    assert [chunk.num_layers for chunk in in_order] == counts


@given(per_stage=COUNTS, pp=COUNTS, vpp=COUNTS)
def test_the_first_virtual_stage_has_the_embedding_and_the_last_one_the_head(per_stage: int, pp: int, vpp: int) -> None:
    stages = split_stages(per_stage * pp * vpp, pp, vpp, None)
    assert [(rank, virtual) for rank in range(pp) for virtual in range(vpp) if stages[rank][virtual].embedding] == [
        (0, 0)
    ]
    heads = [(rank, virtual) for rank in range(pp) for virtual in range(vpp) if stages[rank][virtual].head]
    assert heads == [(pp - 1, vpp - 1)]


@given(layers=st.integers(1, 200), pp=st.integers(2, 16), vpp=st.integers(1, 4))
def test_a_balanced_layout_parses_back_and_its_slots_differ_by_one_at_most(layers: int, pp: int, vpp: int) -> None:
    text = balanced_pipeline_layout(layers, pp, vpp)
    if text is None:
        assert (layers + 2) // (pp * vpp) < 2  # a stage in the middle would be without a layer
        return
    parts = parse_pipeline_layout(text)
    assert len(parts) == pp * vpp
    assert sum(part.count("t") for part in parts) == layers
    slots = [len(part) for part in parts]  # the embedding and the loss fill one slot each
    assert max(slots) - min(slots) <= 1
    assert min(part.count("t") for part in parts[:-1]) >= 1
    assert vpp_of(text, pp) == vpp
    assert len(split_stages(layers, pp, vpp, text)) == pp


@pytest.mark.parametrize(
    ("layers", "pp", "text", "sizes"),
    [
        (61, 8, "Et*7|(t*8|)*6t*6L", [7, 8, 8, 8, 8, 8, 8, 6]),
        (61, 16, "Et*3|(t*4|)*14t*2L", [3, *[4] * 14, 2]),
        (36, 5, "Et*6|(t*8|)*3t*6L", [6, 8, 8, 8, 6]),
        (35, 9, "Et*3|(t*4|)*3t*5|(t*4|)*3t*3L", [3, 4, 4, 4, 5, 4, 4, 4, 3]),
        (4, 3, "Et|t*2|tL", [1, 2, 1]),
        (3, 3, "Et|t*2|L", [1, 2, 0]),  # the last stage may hold the loss alone
    ],
)
def test_the_longer_stages_of_a_balanced_layout_are_in_the_middle(
    layers: int, pp: int, text: str, sizes: list[int]
) -> None:
    assert balanced_pipeline_layout(layers, pp, 1) == text
    assert [chunk.num_layers for (chunk,) in split_stages(layers, pp, 1, text)] == sizes


@pytest.mark.parametrize(("layers", "pp"), [(2, 3), (9, 10), (4, 8)])
def test_too_few_layers_have_no_balanced_layout(layers: int, pp: int) -> None:
    assert balanced_pipeline_layout(layers, pp, 1) is None


def test_one_stage_needs_no_balanced_layout() -> None:
    assert balanced_pipeline_layout(36, 1, 1) is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Et*3|(tt|)*2t*2L", ["Ettt", "tt", "tt", "ttL"]),
        ("Et*4|t*5|t*3,L", ["Etttt", "ttttt", "tttL"]),
        ("E|t||L", ["E", "t", "", "L"]),
        ("(E)*1t*0|L", ["E", "L"]),
        ("Ett|*3L", ["Ett", "", "", "L"]),
        ("E,t,t|t,L", ["Ett", "tL"]),
        ("Et*3|t*2|(tt|)*29,m|L", ["Ettt", "tt", *["tt"] * 29, "m", "L"]),
    ],
)
def test_a_layout_string_is_written_out(text: str, parts: list[str]) -> None:
    assert parse_pipeline_layout(text) == parts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Et*4 | t*4 L", r"has ' '; expected E \(embedding\)"),
        ("Ettx|tL", "has 'x'"),
        ("E(t)*2)|L", r"has '\)'"),
        ("Et*2*3|L", r"has '\*', '3'"),
        ("Et*999999|L", "stands for more than 100000 characters"),
        ("(t*99999)*99999", "stands for more than 100000 characters"),
        ("Et*" + "9" * 4000, "stands for more than 100000 characters"),
        ("(" * 5000, "has 5000 characters"),
    ],
)
def test_what_megatron_would_not_read_is_refused(text: str, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        parse_pipeline_layout(text)


@given(st.text(alphabet="EtmL|*(),0123456789 x", max_size=40))
def test_junk_is_a_layout_error_or_a_split(text: str) -> None:
    for use in (parse_pipeline_layout, lambda junk: vpp_of(junk, 2), lambda junk: split_stages(4, 2, 1, junk)):
        with contextlib.suppress(LayoutError):
            use(text)


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "text", "said"),
    [
        (36, 4, 2, None, r"36 layers % \(pp 4 \* vpp 2\) = 4"),
        (36, 8, 1, None, r"36 layers % \(pp 8 \* vpp 1\) = 4"),
        (4, 2, 1, "Ett|t|tL", r"pipeline_layout has 3 stages, pp 2 \* vpp 1 = 2"),
        (5, 2, 1, "Ett|ttL", "pipeline_layout holds 4 layers, the model has 5"),
        (4, 2, 1, "tt|ttL", "must start with its one E and end with its one L"),
        (4, 2, 1, "Ett|ttLL", "must start with its one E and end with its one L"),
        (4, 2, 1, "Ett|tLt", "must start with its one E and end with its one L"),
        (4, 2, 1, "Ett|ttmL", "has 1 m, mtp_num_layers is 0; expected one m for each"),
    ],
)
def test_a_split_that_does_not_hold_the_model_is_refused(
    layers: int, pp: int, vpp: int, text: str | None, said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        split_stages(layers, pp, vpp, text)


def test_virtual_stages_follow_from_the_string() -> None:
    assert vpp_of("Ett|tt|tt|ttL", 2) == 2
    with pytest.raises(LayoutError, match="pipeline_layout has 4 stages % pp 3 = 1"):
        vpp_of("Ett|tt|tt|ttL", 3)


def test_token_prediction_is_behind_the_last_layer_with_the_loss() -> None:
    stages = split_stages(8, 2, 2, None, 2)
    assert [[chunk.mtp_layers for chunk in rank] for rank in stages] == [[0, 0], [0, 2]]
    last = stages[-1][-1]
    assert (last.num_layers, last.final_norm, last.head) == (2, True, True)


def test_the_final_norm_goes_with_the_loss_and_with_token_prediction_with_the_last_layer() -> None:
    text = "Ett|tt|L"
    assert [chunk.final_norm for (chunk,) in split_stages(4, 3, 1, text)] == [False, False, True]
    stages = split_stages(4, 3, 1, "Ett|tt|mL", 1)
    assert [chunk.final_norm for (chunk,) in stages] == [False, True, False]
    stages = split_stages(4, 3, 1, "Ett|ttm|L", 1)
    assert [(chunk.final_norm, chunk.mtp_layers) for (chunk,) in stages] == [(False, 0), (True, 1), (False, 0)]


@pytest.mark.parametrize(
    ("pp", "text", "mtp_layers", "said"),
    [
        (2, "Ett|ttL", 1, "has 0 m, mtp_num_layers is 1"),
        (2, "Ett|ttmmL", 1, "has 2 m, mtp_num_layers is 1"),
        (2, "Ett|mttL", 1, "has a t behind its m"),
        (2, "Ett|tt|m|mL", 2, "has m in more than one stage"),
        (2, "Ett|ttm||L", 1, "has m before the last virtual stage of its rank; expected m in one of the last 2"),
    ],
)
def test_token_prediction_where_megatron_does_not_take_it_is_refused(
    pp: int, text: str, mtp_layers: int, said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        split_stages(4, pp, vpp_of(text, pp), text, mtp_layers)


def test_a_balanced_layout_counts_token_prediction_as_a_layer() -> None:
    text = balanced_pipeline_layout(61, 16, 1, 1)
    assert text == "Et*3|(t*4|)*14t*2mL"
    assert len(split_stages(61, 16, 1, text, 1)) == 16
    assert balanced_pipeline_layout(61, 32, 1, 2) is None  # no room for two beside the loss


FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "sizes", "chunks"),
    [
        (61, 4, 1, {FIRST: 16, LAST: 13}, [16, 16, 16, 13]),
        (36, 2, 1, {FIRST: 25, LAST: 11}, [25, 11]),
        (94, 4, 1, {LAST: 22}, [24, 24, 24, 22]),
        (20, 4, 2, {FIRST: 2, LAST: 2}, [1, 4, 4, 1, 1, 4, 4, 1]),
        (126, 16, 8, {EMBEDDING: True, LOSS: True}, [0, *[1] * 126, 0]),
        (30, 4, 1, {EMBEDDING: True, LOSS: True}, [7, 8, 8, 7]),
        (31, 4, 1, {LOSS: True}, [8, 8, 8, 7]),
        (36, 4, 1, {FIRST: 9}, None),
        (32, 1, 1, {EMBEDDING: True, LOSS: True}, None),
    ],
)
def test_sizes_of_first_and_last_stage_are_a_layout_string(
    layers: int, pp: int, vpp: int, sizes: dict[str, int], chunks: list[int] | None
) -> None:
    text = sized_pipeline_layout(layers, pp, vpp, StageSizes(**sizes))  # type: ignore[arg-type]
    if chunks is None:
        assert text is None
        return
    stages = split_stages(layers, pp, vpp, text)
    assert [stages[index % pp][index // pp].num_layers for index in range(pp * vpp)] == chunks


@pytest.mark.parametrize(
    ("layers", "pp", "vpp", "sizes", "said"),
    [
        (36, 4, 1, {FIRST: 8}, r"\(36 - 8 = 28 layers\) % 3 further stages = 1"),
        (36, 2, 1, {FIRST: 20, LAST: 15}, "36 - 20 - 15 = 1 layers for 0 further stages of pp 2"),
        (36, 1, 1, {FIRST: 36}, "36 - 36 = 0 layers for 0 further stages of pp 1"),
        (36, 4, 1, {LAST: 40}, "36 - 40 = -4 layers for 3 further stages of pp 4"),
        (36, 2, 2, {FIRST: 17}, "17 layers of a pipeline rank % vpp 2 = 1"),
        (36, 4, 1, {FIRST: 9, LOSS: True}, "beside an embedding or a loss that counts as a layer"),
        (36, 4, 1, {LOSS: True}, r"\(36 layers \+ 1\) % \(pp 4 \* vpp 1\) = 1"),
    ],
)
def test_sizes_that_megatron_refuses(layers: int, pp: int, vpp: int, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        sized_pipeline_layout(layers, pp, vpp, StageSizes(**sizes))  # type: ignore[arg-type]
