"""Tests of the page of a first night."""

import pytest

from perfsuite.case.hardware import Machine
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


@pytest.fixture(scope="module")
def page_of_a_night() -> str:
    return render(
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


def sections_of(page: str) -> dict[str, str]:
    """Return the sections of the page by their headings."""
    return {part.partition("\n")[0]: part for part in page.split("\n## ")}


def test_a_page_names_the_machine(page_of_a_night: str) -> None:
    assert "8 x NVIDIA H100 80GB HBM3 (h100-80gb-sxm)" in page_of_a_night


def test_a_page_has_a_section_for_each_question(page_of_a_night: str) -> None:
    assert [*sections_of(page_of_a_night)][1:] == [
        "Topology",
        "Spread of the GPUs",
        "Noise, and the smallest change",
        "Problems",
        "Refused or not run",
        "Baselines",
        "All checks",
    ]


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ("Topology", "NV18"),
        ("Spread of the GPUs", "700 to 710"),
        ("Noise, and the smallest change", "0.3% between"),
        ("Problems", "| machine | ECC | fail |"),
        ("Refused or not run", "not run: no image was given"),
        ("Baselines", "fsdp2-llama"),
        ("All checks", "### faults: "),
        ("All checks", "Not begun."),
    ],
)
def test_sections_answer_the_questions_of_a_first_night(
    page_of_a_night: str, section: str, text: str
) -> None:
    assert text in sections_of(page_of_a_night)[section]


@pytest.mark.parametrize(
    "words", ["The links were not seen", "The noise was not measured", "no baseline is fit to accept"]
)
def test_names_measurements_that_are_missing(words: str) -> None:
    assert words in render(make_record())


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


@pytest.mark.parametrize(
    ("machine", "sentence"),
    [
        (make_machine(), "This machine has no GPU that could be compared."),
        (GPUS, "The GPUs were not compared."),
    ],
    ids=["cpu", "gpus"],
)
def test_gpus_that_were_not_compared_have_no_spread(machine: Machine, sentence: str) -> None:
    """A check that did not run is listed in a separate section."""
    result = make_result("machine", not_run("nccl-tests", "it needs two GPUs"))
    page = render(make_record(result, machine=machine))
    assert f"## Spread of the GPUs\n\n{sentence}\n" in page
    assert "| machine | nccl-tests | unknown |" in page.partition("## Refused or not run")[2]


def test_markup_in_found_text_is_escaped() -> None:
    page = render(make_record(make_result("machine", failed("torch", "a | b\n<script>"))))
    assert "<script>" not in page
    assert "a &#124; b" in page
