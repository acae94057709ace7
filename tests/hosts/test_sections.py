import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hosts.machines import frame
from topoplan.hosts.sections import number, pairs, read_sections


class TestReadSections:
    def test_takes_each_section_with_its_bytes(self) -> None:
        sections = read_sections(frame({"one": "a\nb\n", "two": "", "three": "@@topoplan two 0 4\nno header\n"}))
        assert [(one.name, one.text, one.is_whole) for one in sections] == [
            ("one", "a\nb\n", True),
            ("two", "", True),
            ("three", "@@topoplan two 0 4\nno header\n", True),
            ("end", "", True),
        ]

    def test_passes_over_what_a_login_prints(self) -> None:
        greeting = b"Welcome to node0!\r\n\x1b[31m*** maintenance ***\x1b[0m\n@@topoplan is not a header\n"
        sections = read_sections(greeting + frame({"one": "a"}) + b"logout\n")
        assert [(one.name, one.text) for one in sections] == [("one", "a"), ("end", "")]

    def test_goes_on_behind_a_section_of_which_the_middle_is_missing(self) -> None:
        output = frame({"long": "x" * 1000, "next": "fine"})
        cut = output[:100] + output[600:]
        first, second, _ = read_sections(cut)
        assert not first.is_whole
        assert first.text.startswith("xxx")
        assert (second.name, second.text, second.is_whole) == ("next", "fine", True)

    def test_keeps_what_there_is_of_a_section_at_the_cut_end(self) -> None:
        (section,) = read_sections(frame({"one": "abcdef"})[:-24])
        assert not section.is_whole
        assert section.text == "abcdef"[: len(section.text)]

    def test_replaces_bytes_that_are_no_text(self) -> None:
        (section,) = read_sections(b"@@topoplan raw 0 3\n\xff\xfe\x00\n")
        assert section.text == "\ufffd\ufffd\x00"

    @given(st.binary(max_size=300))
    def test_never_raises(self, output: bytes) -> None:
        read_sections(output)
        read_sections(frame({"one": "a"}) + output)
        read_sections(b"@@topoplan one 0 999999999\n" + output)


@pytest.mark.parametrize(
    ("code", "text", "problem"),
    [
        (0, "fine", ""),
        (127, "", "not installed"),
        (124, "half an ans", "no answer in time"),
        (9, "\nFailed to initialize NVML: Driver/library version mismatch\nmore\n", "Failed to initialize NVML"),
        (3, "", "exit code 3"),
    ],
)
def test_a_section_says_why_it_has_nothing(code: int, text: str, problem: str) -> None:
    (section,) = read_sections(f"@@topoplan one {code} {len(text)}\n{text}\n".encode())
    assert section.problem.startswith(problem)
    assert bool(section.problem) == bool(problem)


def test_pairs_are_the_lines_with_a_tab() -> None:
    assert pairs("a\t1\nnoise\nb c\t two\twords \n") == [("a", "1"), ("b c", "two\twords")]


@pytest.mark.parametrize(
    ("text", "value"), [("12", 12), (" -1\n", -1), ("", None), ("1e9", None), ("9" * 30, None), ("٣", None)]
)
def test_number_takes_what_a_machine_can_mean(text: str, value: int | None) -> None:
    assert number(text) == value
