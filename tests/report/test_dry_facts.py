from __future__ import annotations

from typing import Any

import pytest

from perfsuite.report.explained import prediction
from perfsuite.report.html.page import render
from perfsuite.report.terminal import explanation
from perfsuite.results.dry_facts import DryFacts, Fit, MemoryPart, Roofline
from tests.samples import make_result, make_run
from tests.sessions import make_session

GIB = 1 << 30
FIT = Fit(
    rank=7,
    live=60 * GIB,
    allocated=61 * GIB,
    reserved=64 * GIB,
    reserved_expandable=62 * GIB,
    outside=(MemoryPart(name="CUDA context", low=GIB // 4, high=GIB // 2, source="s"),),
    card=80 * GIB,
    verdict="tight",
)


def limit(**changes: Any) -> Roofline:
    values: dict[str, Any] = {
        "flops": 551 * 10**12,
        "peak_flops": 989.5e12,
        "wire_bytes": 45 * GIB,
        "link_bytes_per_s": 450 * GIB,
        "between_machines_bytes": 0,
        "tokens": 524_288,
    }
    return Roofline(**{**values, **changes})


def test_the_memory_in_words() -> None:
    assert prediction(DryFacts(fit=FIT)) == [
        "tight: rank 7 needs 61.2 GiB to 64.5 GiB of 80.0 GiB",
        "reserved by the caching allocator 64.0 GiB (62.0 GiB with expandable segments), "
        "allocated 61.0 GiB, live tensors 60.0 GiB",
        "outside the allocator: CUDA context 256.0 MiB to 512.0 MiB",
    ]


def test_the_least_time_in_words() -> None:
    assert prediction(DryFacts(roofline=limit())) == [
        "a step takes 556.8 ms at least, by computation: at most 941,530 tokens/s",
        "551 TFLOP at 989.5 TFLOP/s take 556.8 ms",
        "45.0 GiB between GPUs of a machine at 483 GB/s take 100.0 ms",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"wire_bytes": 0}, "0 bytes between GPUs of a machine"),
        (
            {"link_bytes_per_s": None},
            "45.0 GiB between GPUs of a machine, whose link is unknown: not counted",
        ),
        (
            {"wire_bytes": 0, "between_machines_bytes": 63 * GIB},
            "0 bytes between GPUs of a machine; 63.0 GiB between machines are not counted",
        ),
    ],
)
def test_what_is_not_counted_is_said(changes: dict[str, Any], line: str) -> None:
    assert prediction(DryFacts(roofline=limit(**changes)))[-1] == line


def test_samples_and_nothing() -> None:
    assert "samples/s" in prediction(DryFacts(roofline=limit()), "samples")[0]
    assert prediction(DryFacts()) == []


def test_reports_show_what_a_dry_run_predicts_and_nothing_of_a_launch() -> None:
    dry = make_result(make_run(dry=True, dry_facts=DryFacts(fit=FIT)), before=None)
    launched = make_result(make_run(), before=None)
    (verdict, *_) = prediction(dry.dry_facts)
    assert verdict in explanation(dry)
    page = render([make_session(0).replace(results=(dry,))])
    assert verdict in page
    assert prediction(launched.dry_facts) == []
    assert "predicted" not in render([make_session(0).replace(results=(launched,))])
