from typing import Any
from xml.etree import ElementTree

import pytest

from tests.planner.sharded_cases import DENSE, HOST, ZERO3_AWAY
from tests.report.timelines import lanes_of, line_of
from topoplan.report.timeline_svg import MARK, svg

NAMESPACE = "{http://www.w3.org/2000/svg}"


def picture(title: str = "a title", **options: Any) -> tuple[str, ElementTree.Element]:
    _, plan, line = line_of(**options)
    text = svg(title, plan, line)
    return text, ElementTree.fromstring(text)


@pytest.mark.parametrize(
    "form", [{}, {"pp": 4}, {"pp": 4, "vpp": 3}, {"pp": 4, "recompute": "full", "job": {"global_batch_size": 2048}}]
)
def test_it_is_xml_and_every_box_is_inside(form: dict[str, Any]) -> None:
    text, root = picture(**form)
    assert text.startswith(MARK)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = root.findall(f"{NAMESPACE}rect")
    assert len(boxes) > form.get("pp", 1)
    for box in boxes:
        x, y = float(box.attrib.get("x", 0)), float(box.attrib.get("y", 0))
        assert 0 <= x <= x + float(box.attrib["width"]) <= width + 0.1
        assert 0 <= y <= y + float(box.attrib["height"]) <= height
    words = [node.text for node in root.findall(f"{NAMESPACE}text")]
    assert {f"rank {rank}" for rank in range(form.get("pp", 1))} <= set(words)
    assert "seconds from the start of the step" in words


def test_a_name_with_markup_in_it_is_escaped() -> None:
    text, root = picture("<b>\"R&D\"</b> 'x'")
    assert "<b>" not in text
    title = root.find(f"{NAMESPACE}title")
    assert title.text == "<b>\"R&D\"</b> 'x'"


def test_wide_boxes_have_the_number_of_their_micro_batch() -> None:
    _, root = picture(pp=4, job={"global_batch_size": 32})
    words = [node.text for node in root.findall(f"{NAMESPACE}text")]
    assert words.count("1") == 8  # a forward and a backward on each of four ranks
    assert words.count("8") == 8


def test_what_is_left_out_is_said() -> None:
    text, root = picture(pp=4, job={"global_batch_size": 2048})
    assert "of the steady state are left out" in text
    assert len(root.findall(f"{NAMESPACE}polyline")) == 1
    assert not picture(pp=4, job={"global_batch_size": 16})[1].findall(f"{NAMESPACE}polyline")


@pytest.mark.parametrize(("form", "other"), [(ZERO3_AWAY, HOST), ({"backend": "ddp"}, {}), ({"backend": "fsdp2"}, {})])
def test_lanes_of_a_gpu_are_drawn_with_their_names(form: dict[str, Any], other: dict[str, Any]) -> None:
    _, plan, line = lanes_of(DENSE, form, other)
    root = ElementTree.fromstring(svg("a title", plan, line))
    words = [element.text for element in root.findall(f"{NAMESPACE}text")]
    assert set(line.lanes) <= set(words)
    assert "idle" in words
    assert not {"bubble", "rank 0"} & set(words)
    width = float(root.attrib["width"])
    for box in root.findall(f"{NAMESPACE}rect"):
        assert 0 < float(box.attrib["width"]) <= width
        assert float(box.attrib.get("x", 0)) + float(box.attrib["width"]) <= width + 1e-6


def test_short_calls_in_a_lane_are_not_left_out() -> None:
    _, plan, line = lanes_of(DENSE, {"backend": "fsdp2"}, {})
    text = svg("a title", plan, line)
    gathers = [event for event in line.events if event.kind == "parameter gather"]
    assert text.count('fill="#ef8354"') == len(gathers) + 1  # and the legend
