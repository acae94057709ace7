"""The drawing is well formed and complete, and nothing overlaps."""

import re
from dataclasses import replace
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.network.clusters import cluster_of
from tests.report.test_topology import CLUSTERS
from topoplan.layout.layout import Layout
from topoplan.planner.communication import group_links
from topoplan.report.topology_drawing import MARK, topology_svg
from topoplan.specs.cluster import Cluster

SVG = "{http://www.w3.org/2000/svg}"
MORE = {**CLUSTERS, "small-rails": cluster_of(nodes=2, rails=8), "two-leaves": cluster_of(nodes=4, nodes_per_leaf=2)}


def drawn_with_groups(cluster: Cluster, backend: str | None) -> str:
    """Return a drawing of the cluster, with the groups of a layout of the backend if one is given."""
    if backend is None:
        return topology_svg(cluster)
    split: dict[str, Any] = {"pp": 2} if backend == "mca" and cluster.world_size % 2 == 0 else {}
    if backend == "fsdp2" and cluster.nodes > 1:
        split = {"sharding": "hybrid"}
    layout = Layout.of(backend=backend, dp=cluster.world_size // split.get("pp", 1), **split)
    return topology_svg(cluster, layout, group_links(cluster, layout))


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)


@pytest.mark.parametrize("layout", [None, "fsdp2", "mca"])
@pytest.mark.parametrize("name", MORE)
def test_everything_is_inside_the_page(name: str, layout: str | None) -> None:
    root = parsed(drawn_with_groups(MORE[name], layout))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for box in root.iter(f"{SVG}rect"):
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert x >= 0
        assert y >= 0
        assert x + float(box.attrib["width"]) <= width + 0.01
        assert y + float(box.attrib["height"]) <= height + 0.01
    for words in root.iter(f"{SVG}text"):
        length = 0.6 * float(words.attrib["font-size"]) * len(words.text or "")
        share = 0.5 if words.attrib["text-anchor"] == "middle" else 1.0
        assert float(words.attrib["x"]) + share * length <= width
        assert float(words.attrib["y"]) <= height


@pytest.mark.parametrize("layout", [None, "fsdp2", "mca"])
@pytest.mark.parametrize("name", MORE)
def test_no_words_lie_over_others(name: str, layout: str | None) -> None:
    areas = []
    for words in parsed(drawn_with_groups(MORE[name], layout)).iter(f"{SVG}text"):
        size, text = float(words.attrib["font-size"]), words.text or ""
        length = 0.52 * size * len(text)
        x = float(words.attrib["x"]) - (length / 2 if words.attrib["text-anchor"] == "middle" else 0)
        y = float(words.attrib["y"])
        areas.append((x, y - 0.75 * size, x + length, y, text))
    for one, other in combinations(areas, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, (one, other)


def labels(text: str) -> list[str]:
    return [words.text or "" for words in parsed(text).iter(f"{SVG}text")]


def test_a_small_cluster_is_drawn_whole() -> None:
    drawn = labels(topology_svg(cluster_of(nodes=4, rails=8)))
    assert [word for word in drawn if re.fullmatch(r"node \d", word)] == ["node 0", "node 1", "node 2", "node 3"]
    assert drawn.count("GPU 7") == 4
    assert "leaf rail 7" in drawn


def test_gpus_of_one_group_have_one_number() -> None:
    cluster = cluster_of(nodes=2)
    layout = Layout.of(tp=4, pp=2, dp=2)
    drawn = labels(topology_svg(cluster, layout, group_links(cluster, layout)))
    numbers = [word for word in drawn if word.isdecimal()]
    assert numbers[:16] == ["0"] * 4 + ["1"] * 4 + ["2"] * 4 + ["3"] * 4
    assert numbers[16:32] == [*"01230123", *"45674567"]
    assert numbers[32:] == [*"01234567"] * 2
    assert "pp: 8 groups of 2, tightest NIC 400Gb/s." in drawn


def test_a_large_one_is_a_node_that_stands_for_all() -> None:
    drawn = labels(topology_svg(CLUSTERS["large"]))
    assert drawn.count("GPU 0") == 1
    assert "2,048" in drawn


def test_a_name_cannot_break_the_file() -> None:
    name = "<a & b>"
    drawn = labels(topology_svg(replace(cluster_of(nodes=1), name=name)))
    assert drawn[0].startswith(name)


def test_every_drawing_is_marked_and_the_same_each_time() -> None:
    text = topology_svg(CLUSTERS["rails"])
    assert MARK in text[:500]
    assert text == topology_svg(CLUSTERS["rails"])
