import pytest

from perfsuite.case.fault import STRUCTURAL, Fault
from perfsuite.errors import CaseError


@pytest.mark.parametrize(
    ("text", "kind", "size"),
    [
        ("slowdown=30%", "slowdown", 0.3),
        ("slowdown=2.5%", "slowdown", 0.025),
        ("leak=20%", "leak", 0.2),
        ("stall=10", "stall", 10),
        *(
            (kind, kind, 0)
            for kind in [
                *("nan", "loss", "missing-metric", "missing-rank", "crash", "exit", "oom", "hang"),
                *("reshard-toggled", "checkpointing-lost", "weight-copy"),
            ]
        ),
    ],
)
def test_reads_the_kind_and_size_of_a_fault(text: str, kind: str, size: float) -> None:
    fault = Fault.parse(text)
    assert (fault.kind, fault.size) == (kind, size)


BAD = "/slow/slowdown/slowdown=30/slowdown=-3%/slowdown=%/leak=20/stall=0/stall=10%/crash=1/crash /Crash"


@pytest.mark.parametrize("text", BAD.split("/"))
def test_parse_names_the_text_and_what_is_allowed(text: str) -> None:
    with pytest.raises(CaseError) as caught:
        Fault.parse(text)
    message = str(caught.value)
    assert message.startswith(f"--perf-inject {text!r}: give slowdown=P%, leak=P%, stall=N, or one of nan, ")
    assert ", ".join(["crash, exit, oom, hang", *STRUCTURAL]) in message
    assert message.endswith("weight-copy") == (
        text.partition("=")[0] in ("", "slowdown", "leak", "stall", "crash")
    )
