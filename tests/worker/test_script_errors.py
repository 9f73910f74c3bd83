from __future__ import annotations

from pathlib import Path

from perfsuite.results.run_dir import RunDir
from perfsuite.worker import script_errors
from perfsuite.worker.optimizers import Optimizers


class Adam:
    pass


def test_an_early_end_is_told_with_what_to_do(tmp_path: Path) -> None:
    first = script_errors.ended_early(3, 12, Optimizers(), RunDir(tmp_path / "launch-1"))
    assert str(first) == (
        "the script ended after 3 of 12 optimizer steps: lower max_warmup_steps or steps, or give it more "
        "data; or, where it goes on from files of an earlier run, have it keep them in {launch_dir}, a new "
        "directory in each launch"
    )
    later = script_errors.ended_early(3, 12, Optimizers(), RunDir(tmp_path / "launch-2"))
    assert "but not so in the launch before: that may have left files" in str(later)


def test_where_several_optimizers_stepped_they_are_told(tmp_path: Path) -> None:
    optimizers, made = Optimizers(), [Adam(), Adam()]
    for each in made:
        optimizers.count(each)
    said = str(script_errors.ended_early(1, 12, optimizers, RunDir(tmp_path)))
    assert said.endswith("in each launch. Those that stepped: Adam (1 steps), Adam:2 (1 steps)")
    assert str(script_errors.no_clock(Optimizers("SGD"))) == (
        "clock='SGD': no such optimizer stepped. None of torch stepped"
    )
