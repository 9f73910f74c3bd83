import json
import math

import pytest

from perfsuite import documents
from perfsuite.errors import CaseError
from perfsuite.results.run import DeviceHealth, Figures, Health, LaunchFile, Run
from tests.samples import make_case, make_machine, make_run


def test_figures_are_named_and_read_back() -> None:
    figures = Figures(mfu=0.4, tokens_per_s=1.0, extra={"b": 2.0, "a": 3.0})
    assert list(figures.by_name().items()) == [("tokens_per_s", 1.0), ("mfu", 0.4), ("a", 3.0), ("b", 2.0)]
    assert Figures.of(figures.by_name()) == figures
    assert [figures.get(name) for name in ("mfu", "a")] == [0.4, 3.0]
    assert [figures.get(name) for name in ("step_s_p50", "c", "extra", "get")] == [None] * 4
    assert Figures.model_validate({"mfu": 0.4}) == Figures(mfu=0.4)
    figures = Figures(mfu=math.inf, extra={"a": -math.inf})
    assert Figures.model_validate(json.loads(json.dumps(documents.plain(figures)))) == figures


def test_records_no_serial_number_of_a_card() -> None:
    assert not {"uuid", "serial"} & DeviceHealth.model_fields.keys()
    with pytest.raises(CaseError, match="unknown field"):
        DeviceHealth(index=0, serial="1654123000001")  # type: ignore[call-arg]


def test_names_a_gpu_by_number_and_known_bus() -> None:
    assert DeviceHealth(index=0).name == "GPU 0"
    assert DeviceHealth(index=3, pci_bus_id="00000000:5B:00.0").name == "GPU 3 (00000000:5B:00.0)"
    with pytest.raises(CaseError, match="index"):
        DeviceHealth(index=-1)
    with pytest.raises(CaseError, match="samples"):
        Health(samples=-1, seconds=0, steps=0)


def test_a_launch_has_no_oom_kills_unless_counted() -> None:
    assert LaunchFile(node=0).oom_kills == 0


def test_measured_steps_are_those_of_the_window() -> None:
    assert make_run(step_s=(1.0, 2.0, 3.0, 4.0), window=(1, 3)).measured_steps == (2.0, 3.0)
    bare = Run(case=make_case(), machine=make_machine(), started_at="now", duration_s=1)
    assert (bare.window, bare.measured_steps) == ((0, 0), ())


@pytest.mark.parametrize("window", [(-1, 1), (2, 1), (0, 4), (4, 4)])
def test_a_window_outside_of_the_steps_is_refused(window: tuple[int, int]) -> None:
    with pytest.raises(CaseError, match="is not within its 3 steps"):
        make_run(step_s=(0.1, 0.2, 0.3), window=window)
