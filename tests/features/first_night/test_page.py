"""Tests of the page of a first night."""

import pytest

from perfsuite.doctor.rows import Row, failed, passed, unknown
from perfsuite.features.first_night.night import not_run
from perfsuite.features.first_night.page import answer, render
from perfsuite.features.first_night.sessions import REACHED
from perfsuite.features.first_night.steps import NAMES
from tests.features.first_night.nights import make_record, make_result
from tests.samples import make_gpu_machine, make_machine

GPUS = make_gpu_machine()


def whole(*rows: Row, step: str = "cases") -> object:
    """Return a record of all steps. The step `step` has these rows."""
    others = [make_result(name) for name in NAMES if name != step]
    return make_record(make_result(step, *rows), *others, machine=GPUS, size="full")


def test_sections_answer_the_questions_of_a_first_night() -> None:
    page = render(
        make_record(
            make_result(
                "machine",
                passed("topology", "NV18 between all 28 pairs of GPUs"),
                passed("matmul_tflops", "700 to 710 over 8 GPUs"),
                failed("ECC", "GPU 0: on, GPU 1: off", "configure all GPUs alike"),
            ),
            make_result("spread", passed("noise", "0.3% between launches")),
            make_result("container", not_run("image", "no image was given")),
            make_result("cases", passed("fsdp2-llama", "fit for a baseline")),
            machine=GPUS,
            size="full",
        )
    )
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")}
    assert [*sections][1:] == [
        "Topology",
        "Spread of the GPUs",
        "Noise, and the smallest change",
        "Problems",
        "Refused or not run",
        "Baselines",
        "All checks",
    ]
    assert "NV18" in sections["Topology"]
    assert "700 to 710" in sections["Spread of the GPUs"]
    assert "0.3% between" in sections["Noise, and the smallest change"]
    assert "| machine | ECC | fail |" in sections["Problems"]
    assert "not run: no image was given" in sections["Refused or not run"]
    assert "fsdp2-llama" in sections["Baselines"]
    assert "8 x NVIDIA H100 80GB HBM3 (h100-80gb-sxm)" in page
    assert "### faults: " in sections["All checks"]
    assert "Not begun." in sections["All checks"]


def test_what_was_not_seen_is_said_so() -> None:
    page = render(make_record())
    for words in ("The links were not seen", "The noise was not measured", "no baseline is fit to accept"):
        assert words in page


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((passed("a", "fit"),), "1 baseline is fit to accept: perfsuite baseline refresh --hardware h100"),
        ((passed(REACHED, "all"), unknown("a", "noisy")), "No baseline is fit to accept yet."),
        ((passed("a", "fit"), failed("b", "")), "Before accepting a baseline, repair what failed."),
        ((unknown("a", "noisy"),), "0 passed, 0 failed, 1 unknown, 0 not run. No baseline is fit"),
        ((not_run("cases", "no cases"),), "0 unknown, 1 not run. No baseline is fit to accept yet."),
    ],
)
def test_the_answer_names_the_next_step(rows: tuple[Row, ...], said: str) -> None:
    assert said in answer(whole(*rows))  # type: ignore[arg-type]


def test_an_unfinished_night_says_what_is_left() -> None:
    record = make_record(make_result("machine", is_complete=False), make_result("spread"))
    assert "Not finished: machine, selftest, faults, " in answer(record)


SAID = "Simulated on CPUs: nothing here says anything about GPUs."


def test_simulated_training_proves_nothing() -> None:
    record = whole(passed("a", "fit")).replace(size="simulated")  # type: ignore[attr-defined]
    assert answer(record).endswith(SAID)
    assert answer(whole(passed("a", "fit"))).find(SAID) == -1  # type: ignore[arg-type]


def test_a_simulated_page_begins_with_what_it_is() -> None:
    """This is true even if the night is not finished, and the page names the steps that are left."""
    assert render(make_record(size="simulated")).startswith(f"# First night\n\n**{SAID}**\n")
    assert SAID not in render(make_record())


def test_a_cpu_is_one_device_with_cores() -> None:
    assert "\nTest CPU, 2 cores (cpu-test-2c), perfsuite" in render(make_record())


def test_gpus_that_were_not_compared_have_no_spread() -> None:
    """A check that did not run is listed in a separate section."""
    result = make_result("machine", not_run("nccl-tests", "it needs two GPUs"))
    for machine, said in (
        (make_machine(), "This machine has no GPU that could be compared."),
        (GPUS, "The GPUs were not compared."),
    ):
        page = render(make_record(result, machine=machine))
        assert f"## Spread of the GPUs\n\n{said}\n" in page
        assert "| machine | nccl-tests | unknown |" in page.partition("## Refused or not run")[2]


def test_text_of_others_is_no_markup() -> None:
    page = render(make_record(make_result("machine", failed("torch", "a | b\n<script>"))))
    assert "<script>" not in page
    assert "a &#124; b" in page
