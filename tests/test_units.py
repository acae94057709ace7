import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topoplan import units
from topoplan.errors import UnitError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GB", 80 * 10**9),
        ("80 GB", 80 * 10**9),
        ("79.6GiB", round(79.6 * 2**30)),
        ("81559MiB", 81559 * 2**20),
        ("81559 MiB", 81559 * 2**20),
        ("2TB", 2 * 10**12),
        ("512B", 512),
        ("1_000kB", 10**6),
    ],
)
def test_an_amount_becomes_bytes(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("900GB/s", 900e9),
        ("3.35TB/s", 3.35e12),
        ("400Gb/s", 50e9),
        ("400 Gb/s", 50e9),
        ("400Gbps", 50e9),
        ("400Gbit/s", 50e9),
        ("1.6Tb/s", 200e9),
        ("50GiB/s", 50 * 2**30),
        ("50GBps", 50e9),
        ("1Mb/s", 125e3),
    ],
)
def test_a_rate_becomes_bytes_per_second_and_small_b_is_bits(text: str, expected: float) -> None:
    assert units.parse_rate(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("989TFLOPS", 989e12), ("989 TFLOP/s", 989e12), ("1.9PFLOPS", 1.9e15), ("989tflops", 989e12), ("1EFLOPS", 1e18)],
)
def test_a_speed_becomes_flops(text: str, expected: float) -> None:
    assert units.parse_flops(text) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5us", 5e-6),
        ("5µs", 5e-6),
        ("30us", 30e-6),
        ("1.5ms", 1.5e-3),
        ("12s", 12.0),
        ("4min", 240.0),
        ("24h", 86400.0),
    ],
)
def test_a_time_becomes_seconds(text: str, expected: float) -> None:
    assert units.parse_seconds(text) == expected


def test_a_bare_rate_says_both_units_that_would_do() -> None:
    with pytest.raises(UnitError) as error:
        units.parse_rate(900)
    assert str(error.value) == "900 has no unit; write 900GB/s (bytes) or 900Gb/s (bits)"


@pytest.mark.parametrize(
    ("parse", "remedy"),
    [(units.parse_bytes, "80GiB"), (units.parse_flops, "80TFLOPS"), (units.parse_seconds, "80us")],
)
def test_a_bare_number_says_which_unit_is_missing(parse, remedy: str) -> None:
    with pytest.raises(UnitError, match="80 has no unit") as error:
        parse(80)
    assert remedy in str(error.value)


@pytest.mark.parametrize("text", ["400gb/s", "400gbps", "400GB/S", "400mb/s", "400gib/s"])
def test_a_rate_that_may_be_bits_or_bytes_is_refused(text: str) -> None:
    with pytest.raises(UnitError, match=r"ambiguous.*\(bytes\) or .*\(bits\)"):
        units.parse_rate(text)


def test_an_amount_in_place_of_a_rate_is_told_so() -> None:
    with pytest.raises(UnitError, match="900GB is an amount, not a rate; write 900GB/s"):
        units.parse_rate("900GB")


@pytest.mark.parametrize("parse", [units.parse_bytes, units.parse_rate, units.parse_flops, units.parse_seconds])
@pytest.mark.parametrize(
    "value",
    [0, -1, math.nan, math.inf, "nan", "inf", "", " ", "fast", True, None, [], {}, "5 parsecs", "٣GB", "1,000GB"],
)
def test_what_is_no_quantity_is_refused(parse, value: object) -> None:
    with pytest.raises(UnitError):
        parse(value)


@pytest.mark.parametrize("number", ["0", "0.0", "-5", "1e400", "1e-400", "-0"])
def test_zero_negative_and_boundless_quantities_are_refused(number: str) -> None:
    for parse, unit in (
        (units.parse_bytes, "GB"),
        (units.parse_rate, "GB/s"),
        (units.parse_flops, "TFLOPS"),
        (units.parse_seconds, "us"),
    ):
        with pytest.raises(UnitError):
            parse(number + unit)


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.binary()))
def test_no_input_gives_anything_but_a_positive_quantity_or_a_unit_error(value: object) -> None:
    for parse in (units.parse_bytes, units.parse_rate, units.parse_flops, units.parse_seconds):
        try:
            result = parse(value)
        except UnitError as error:
            message = str(error)
        else:
            message = ""
            assert 0 < result < math.inf
        assert "\n" not in message
        assert len(message) < 400


_sensible = st.floats(min_value=1e-6, max_value=1e15, allow_nan=False)


@given(_sensible)
def test_what_is_printed_is_read_back_within_its_four_digits(value: float) -> None:
    for parse, show in (
        (units.parse_rate, units.format_byte_rate),
        (units.parse_rate, units.format_bit_rate),
        (units.parse_seconds, units.format_seconds),
    ):
        scaled = value + 1 if parse is units.parse_rate else value
        assert parse(show(scaled)) == pytest.approx(scaled, rel=1e-3)


@given(st.integers(min_value=1, max_value=2**50))
def test_whole_bytes_survive_the_smallest_unit(amount: int) -> None:
    assert units.parse_bytes(f"{amount}B") == amount


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.format_gib(81559 * 2**20), "79.6GiB"),
        (units.format_byte_rate(900e9), "900GB/s"),
        (units.format_byte_rate(3.35e12), "3.35TB/s"),
        (units.format_bit_rate(50e9), "400Gb/s"),
        (units.format_bit_rate(200e9), "1600Gb/s"),
        (units.format_seconds(5e-6), "5us"),
        (units.format_seconds(90), "90s"),
        (units.format_seconds(9000), "2.5h"),
    ],
)
def test_quantities_are_shown_as_vendors_write_them(shown: str, expected: str) -> None:
    assert shown == expected


def test_gib_is_binary() -> None:
    assert units.gib(2**30) == 1.0


@pytest.mark.parametrize(
    ("text", "highest", "meant"),
    [("400GB/s", 250e9, "400Gb/s"), ("900TB/s", 1e13, "900GB/s"), ("400Tb/s", 250e9, "400Gb/s"), ("3PB/s", 1e9, "")],
)
def test_an_absurd_rate_is_taken_for_the_nearest_likely_slip(text: str, highest: float, meant: str) -> None:
    assert units.probably_meant(text, units.parse_rate, 1e7, highest) == meant


@pytest.mark.parametrize(
    ("text", "count"), [("2B", 2 * 10**9), ("1.5 T", 15 * 10**11), ("500M", 5 * 10**8), ("2e9", 2 * 10**9), ("64", 64)]
)
def test_a_count_may_have_a_prefix(text: str, count: int) -> None:
    assert units.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "2X", "-1", "0", "0.2", "1e999", "two", "2BB"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(UnitError, match="is not a count"):
        units.parse_count(text)


def test_long_lists_are_cut() -> None:
    assert units.named("abc") == "a, b, c"
    assert units.named("abcde") == "a, b, c and 2 more"
    assert units.named([]) == ""


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("h100-4x8", "h100-4x8"),
        ("../../etc", "etc"),
        ("my lab/row 2", "my-lab-row-2"),
        ("..", "cluster"),
        (".hidden", "hidden"),
    ],
)
def test_a_name_of_a_file_cannot_leave_its_directory(name: str, file: str) -> None:
    assert units.file_name(name, "cluster") == file


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.26878, "2.3 s"), (15.0, "15 s"), (600.04, "600 s"), (0.048, "0.05 s"), (0, "0 s")]
)
def test_seconds_that_somebody_waited_are_said_as_exactly_as_is_of_use(seconds: float, text: str) -> None:
    assert units.in_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a" * 60, "'" + "a" * 60 + "'"),
        ("a" * 61, "'" + "a" * 57 + "...'"),
        ("\x1b[0m", r"'\x1b[0m'"),
        ("\x00" * 61, "'" + r"\x00" * 13 + r"\x0" + "...'"),
    ],
)
def test_a_text_in_a_sentence_is_short_and_has_both_its_quotation_marks(value: str, text: str) -> None:
    assert units.shown(value) == text
