from __future__ import annotations

from perfsuite.report.preflight import as_text, notes, table, title
from perfsuite.report.text import NONE
from perfsuite.results.run import Health
from perfsuite.results.session_file import NodePreflight, Preflight
from tests.samples import make_machine

FOUND = Preflight(
    started_at="2026-01-02T03:04:05+00:00",
    duration_s=8.6,
    machine=make_machine(),
    nodes=(
        NodePreflight(
            name="n1",
            rates={"matmul_tflops": 0.08123, "copy_gb_s": 9.9, "all_reduce_gb_s": 0.41, "next_gb_s": 0.5},
            health=Health(samples=0, seconds=0, steps=0, notes=("PCIe width x8",)),
        ),
        NodePreflight(name="n2", problems=("crash: no route to [n1]", "copy is slow")),
    ),
    directory="store/preflight-1",
)
CORES = make_machine().device_name


def test_each_node_has_a_row_with_what_is_known_of_it() -> None:
    assert table(FOUND).rows == [
        ("n1", "0.0812 TFLOP/s", "9.9 GB/s", "0.41 GB/s", NONE, "0.5 GB/s", "nothing"),
        ("n2", *[NONE] * 5, "crash: no route to [n1]; copy is slow"),
    ]
    assert {len(row) for row in table(FOUND).rows} == {len(table(FOUND).headers)}


def test_the_title_counts_bad_nodes_or_says_why_all_of_them_failed() -> None:
    assert title(FOUND) == f"preflight of 2 nodes ({CORES}) in 9 s: 1 of them bad"
    good = FOUND.replace(nodes=FOUND.nodes[:1])
    assert title(good) == f"preflight of 1 node ({CORES}) in 9 s: none of them bad"
    why = "crash in the preflight: no torch"
    failed = f"in 9 s: it failed, which tells nothing of the nodes: {why}"
    assert title(good.replace(failure=why)).endswith(failed)


def test_as_text_it_is_a_table_with_the_notes_under_it() -> None:
    assert notes(FOUND) == ["n1: PCIe width x8"]
    first, headers, good, bad, note = as_text(FOUND).splitlines()
    assert first == title(FOUND)
    assert headers.split("  ")[1].strip() == "node"
    assert good.split() == ["n1", *" ".join(table(FOUND).rows[0][1:]).split()]
    assert bad.endswith("crash: no route to [n1]; copy is slow")
    assert headers.index("what is wrong") == good.index("nothing") == bad.index("crash")
    assert note == "  note: n1: PCIe width x8"
