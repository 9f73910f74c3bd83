from collections.abc import Callable
from typing import Any

import pytest

from perfsuite.case.case import Topology
from perfsuite.report import markdown, summary
from perfsuite.report.html import page
from perfsuite.report.nodes import notes, scalings, table, title
from perfsuite.report.terminal import preflight_text
from perfsuite.report.text import NONE
from perfsuite.results.run import Health
from perfsuite.results.session_file import Measurement, NodePreflight, Preflight, SessionFile
from tests.samples import make_case, make_figures, make_machine, make_result, make_run, make_session_file

RATES = {"matmul_tflops": 0.08123, "copy_gb_s": 9.9, "all_reduce_gb_s": 0.41, "next_gb_s": 0.5}
NARROW = Health(samples=0, seconds=0, steps=0, notes=("PCIe width x8",))
FOUND = Preflight(
    started_at="2026-01-02T03:04:05+00:00",
    duration_s=8.6,
    machine=make_machine(),
    nodes=(
        NodePreflight(name="n1", rates=RATES, health=NARROW),
        NodePreflight(name="n2", problems=("crash: no route to [n1]", "copy is slow")),
    ),
    directory="store/preflight-1",
)


def test_title_counts_bad_nodes_or_explains() -> None:
    cores = make_machine().device_name
    assert title(FOUND) == f"preflight of 2 nodes ({cores}) in 9 s: 1 of them bad"
    good = FOUND.replace(nodes=FOUND.nodes[:1])
    assert title(good) == f"preflight of 1 node ({cores}) in 9 s: none of them bad"
    why = "crash in the preflight: no torch"
    assert title(good.replace(failure=why)).endswith(f"it failed, so nothing is known about the nodes: {why}")


def test_each_node_has_a_row() -> None:
    assert table(FOUND).rows == [
        ("n1", "0.0812 TFLOP/s", "9.9 GB/s", "0.41 GB/s", NONE, "0.5 GB/s", "nothing"),
        ("n2", *[NONE] * 5, "crash: no route to [n1]; copy is slow"),
    ]
    assert {len(row) for row in table(FOUND).rows} == {len(table(FOUND).headers)}


def test_the_terminal_shows_nodes_with_notes_below() -> None:
    first, headers, good, bad, note = preflight_text(FOUND).splitlines()
    assert (first, headers.split()[0]) == (title(FOUND), "node")
    assert good.split() == " ".join(table(FOUND).rows[0]).split()
    assert headers.index("what is wrong") == good.index("nothing") == bad.index("crash: no route to [n1]")
    assert [note] == [f"  note: {text}" for text in notes(FOUND)] == ["  note: n1: PCIe width x8"]


def measured(nodes: int, *speeds: float, **changes: object) -> Measurement:
    case = make_case(topology=Topology(nodes=nodes, processes_per_node=2), **changes)
    runs = [make_run(case=case, figures=make_figures(tokens_per_s=speed)) for speed in speeds]
    return make_result(*runs, before=None)


ONE_NODE = measured(1, 1000.0)
TWO_NODES = measured(2, 1900.0)


def test_scaling_compares_cases_by_node_count() -> None:
    results = [measured(4, 3600.0), measured(1, 900.0, 1000.0, 5000.0), measured(2, 1900.0)]
    (sentence,) = scalings([*results, measured(2, 7.0, micro_batch=9)])
    name = results[1].case_id.removesuffix("-1x2")
    shares = "1 node 100%, 2 nodes 95%, 4 nodes 90%"
    assert sentence == f"speed per device of {name}, relative to the smallest number of nodes: {shares}"


def test_two_node_counts_have_a_scaling() -> None:
    assert len(scalings([ONE_NODE, TWO_NODES])) == 1


def test_a_case_that_was_not_launched_has_no_scaling() -> None:
    assert scalings([TWO_NODES, measured(2, 8.0), ONE_NODE.replace(runs=())]) == []


@pytest.mark.parametrize(
    "change",
    [{"machine": make_machine(device_name="another")}, {"inject": "nan"}],
    ids=["another machine", "a fault"],
)
def test_unlike_launches_have_no_scaling(change: dict[str, Any]) -> None:
    other = TWO_NODES.replace(runs=tuple(run.replace(**change) for run in TWO_NODES.runs))
    assert scalings([ONE_NODE, other]) == []


@pytest.mark.parametrize(
    "render",
    [
        lambda session: page.render([session]),
        lambda session: markdown.render([session]),
        lambda session: summary.in_short(session.results)[0],
    ],
    ids=["HTML", "Markdown", "summary"],
)
def test_reports_show_the_scaling(render: Callable[[SessionFile], str]) -> None:
    text = render(make_session_file(ONE_NODE, TWO_NODES))
    assert "relative to the smallest number of nodes: 1 node 100%, 2 nodes 95%" in text


def test_one_case_has_no_scaling_in_a_report() -> None:
    assert "scaling" not in markdown.render([make_session_file(ONE_NODE)])
