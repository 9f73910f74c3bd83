"""Which processes of launches are forked from one that has imported torch."""

import sys

from perfsuite.dry.driver import _environment
from tests.samples import make_case
from tests.warm import DRY, FIRST, VARIABLES, can_be_forked

DRY_RUN = [sys.executable, "-m", DRY, "directory"]
ENVIRONMENT = {**FIRST, **VARIABLES}


def test_forks_a_launch_whose_environment_is_that_of_the_tests() -> None:
    assert can_be_forked(DRY_RUN, ENVIRONMENT)


def test_forks_a_rank_of_a_dry_run_with_the_variables_of_torchrun() -> None:
    environment = _environment(make_case(), 1)
    assert environment["TORCHELASTIC_RUN_ID"]
    assert can_be_forked(DRY_RUN, environment)


def test_forks_a_launch_after_torch_has_set_its_cache() -> None:
    """Which it does in a test process that imports as much of torch as most tests do."""
    assert can_be_forked(DRY_RUN, {**ENVIRONMENT, "TORCHINDUCTOR_CACHE_DIR": "of the test process"})


def test_starts_a_launch_anew_whose_torch_reads_another_variable() -> None:
    assert not can_be_forked(DRY_RUN, {**ENVIRONMENT, "TORCH_LOGS": "dynamo"})
