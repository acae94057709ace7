import pytest

from topoplan.errors import SpecError
from topoplan.specs.passed_on import check_option


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("partition", "gpu", ("partition", "gpu")),
        ("gpus_per_node", "h100:8", ("gpus-per-node", "h100:8")),
        ("mail-user", " ada@example.org ", ("mail-user", "ada@example.org")),
        ("time", 90, ("time", "90")),
        ("nice", -5, ("nice", "-5")),
        ("requeue", True, ("requeue", True)),
        ("exclusive", False, ("exclusive", False)),
        ("comment", 'a "b" # $(c)', ("comment", 'a "b" # $(c)')),
    ],
)
def test_an_option_is_taken_as_sbatch_takes_it(
    name: str, value: str | int | bool, option: tuple[str, str | bool]
) -> None:
    assert check_option(name, value) == option


@pytest.mark.parametrize("name", ["p", "--partition", "Partition", "a b", "a=b", "a\n#SBATCH", "", "x" * 65, 5, None])
def test_a_name_that_is_no_long_option_is_refused(name: object) -> None:
    with pytest.raises(SpecError, match="is not an option of sbatch; expected a long name, such as partition"):
        check_option(name, "x")


@pytest.mark.parametrize("name", ["nodes", "ntasks", "ntasks-per-node", "ntasks_per_node", "array", "wrap"])
def test_what_the_plan_decides_is_refused(name: str) -> None:
    with pytest.raises(SpecError, match=r"; (set `nodes` instead|leave it out)$"):
        check_option(name, "4")


@pytest.mark.parametrize(
    "value", ["a\nb", "a\0b", "\x1b[31m", "it's", "a\\", "", " ", "x" * 1025, 10**10, 10**5000], ids=range(10)
)
def test_a_value_that_could_leave_its_line_is_refused(value: object) -> None:
    with pytest.raises(SpecError, match="is not usable; expected text on one line without ' and"):
        check_option("comment", value)


@pytest.mark.parametrize("value", [1.5, ["a"], {"a": "b"}])
def test_a_value_that_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(SpecError, match="is not text; put it in quotes"):
        check_option("time", value)
