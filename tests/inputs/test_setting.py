from typing import Any

import pytest

from perfsuite.errors import CaseError
from perfsuite.inputs.setting import Setting, words

PLAIN = Setting(name="x-pool", metavar="NAME", default="any", help="the pool")
WORDS = Setting(name="x-options", metavar="WORDS", parse=words, help="options")
FLAG = Setting(name="x-spot", help="a flag")
CHOICE = Setting(name="x-when", metavar="now|later", default="now", help="a choice")


@pytest.mark.parametrize(
    ("setting", "given", "value"),
    [
        (PLAIN, None, "any"),
        (PLAIN, "", "any"),
        (PLAIN, "gpu", "gpu"),
        (WORDS, None, None),
        (WORDS, "-v --comment='a b'", ["-v", "--comment=a b"]),
        (WORDS, ["-v", "--comment=a b"], ["-v", "--comment=a b"]),
        (FLAG, None, False),
        (FLAG, True, True),
        (FLAG, "true", True),
        (FLAG, "False", False),
        (CHOICE, None, False),
        (CHOICE, "later", True),
    ],
)
def test_reads_values_of_every_kind(setting: Setting, given: Any, value: object) -> None:
    assert setting.read("--perf-x", given) == value


@pytest.mark.parametrize(
    ("setting", "given", "said"),
    [
        (WORDS, "--comment='a", r"^perf_x=--comment='a: give words as in a shell \(No closing quotation\)$"),
        (CHOICE, "soon", "^perf_x=soon: give now or later$"),
    ],
)
def test_error_names_the_value_and_what_is_allowed(setting: Setting, given: str, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        setting.read("perf_x", given)


def test_is_an_option_and_an_ini_key() -> None:
    assert (PLAIN.spelled, PLAIN.key) == ("--perf-x-pool", "perf_x_pool")
    assert PLAIN.help_with_default == "the pool (default: any)"
    assert FLAG.help_with_default == "a flag"
