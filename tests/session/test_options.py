from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.samples import (
    never_run,
)
from tests.session.making import make_session


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "wait"),
        ({"wait_quiet_s": 0}, "again"),
        ({"allow_shared": True}, "stop"),
        ({"allow_shared": True, "wait_quiet_s": 0}, "stop"),
    ],
)
def test_what_is_done_about_others_follows_from_the_options(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    assert replace(make_session(tmp_path).setup.options, **options).when_shared == expected


@pytest.mark.parametrize(
    ("outcome", "strict", "failing"),
    [
        ("regressed", {}, True),
        ("failed", {}, True),
        ("passed", {}, False),
        ("unhealthy", {}, False),
        ("improved", {}, False),
        ("improved", {"strict": frozenset({"improved"})}, True),
        ("inconclusive", {}, False),
        ("inconclusive", {"strict": frozenset({"inconclusive"})}, True),
    ],
)
def test_which_outcomes_fail(tmp_path: Path, outcome: str, strict: dict[str, Any], failing: bool) -> None:
    ours = make_session(tmp_path)
    ours.setup.options = replace(ours.setup.options, **strict)
    verdict = never_run().verdict.replace(outcome=outcome)
    assert ours.setup.options.is_failing(never_run().replace(verdict=verdict)) is failing
