from __future__ import annotations

from perfsuite.case.case import Topology
from perfsuite.report import markdown, summary
from perfsuite.report.html import page
from perfsuite.report.scaling import scalings
from perfsuite.results.session_file import Measurement
from tests.samples import make_case, make_figures, make_result, make_run, make_session_file


def measured(nodes: int, *speeds: float, **changes: object) -> Measurement:
    case = make_case(topology=Topology(nodes=nodes, processes_per_node=2), **changes)
    runs = [make_run(case=case, figures=make_figures(tokens_per_s=speed)) for speed in speeds]
    return make_result(*runs, before=None)


def test_cases_that_differ_in_nodes_alone_are_set_side_by_side() -> None:
    results = [measured(4, 3600.0), measured(1, 900.0, 1000.0, 5000.0), measured(2, 1900.0)]
    (found,) = scalings([*results, measured(2, 7.0, micro_batch=9)])
    name = results[1].case_id.removesuffix("-1x2")
    shares = "1 node 100%, 2 nodes 95%, 4 nodes 90%"
    assert found == f"scaling of {name}: {shares} of the speed per device"


def test_one_number_of_nodes_other_machines_and_figures_that_prove_nothing_are_no_scaling() -> None:
    one, two = measured(1, 1000.0), measured(2, 1900.0)
    assert len(scalings([one, two])) == 1
    assert scalings([two, measured(2, 8.0), one.replace(runs=())]) == []
    other = [run.replace(machine=run.machine.replace(device_name="another")) for run in two.runs]
    assert scalings([one, two.replace(runs=tuple(other))]) == []
    assert scalings([one, two.replace(runs=tuple(run.replace(inject="nan") for run in two.runs))]) == []


def test_every_report_shows_it() -> None:
    both = make_session_file(measured(1, 1000.0), measured(2, 1900.0))
    told = "2 nodes 95% of the speed per device"
    for text in (page.render([both]), markdown.render([both]), *summary.in_short(both.results)[:1]):
        assert told in text
    assert "scaling" not in markdown.render([make_session_file(measured(1, 1000.0))])
