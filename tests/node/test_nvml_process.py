import sys
from pathlib import Path

import pytest

from perfsuite.case.hardware import Machine
from perfsuite.errors import MachineError
from perfsuite.launch import quiet
from perfsuite.node import machine, nvml_process
from tests.processes import executable
from tests.samples import make_gpu_machine

PRESENT = "libc.so.6"
"""A library that every machine has, in place of NVML."""
ABSENT = "no-such-library.so"


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a fake interpreter for the child.

    Tests write it as a shell script. Without it, starting a child is an error.
    """
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    return tmp_path / "python"


def test_detects_machine_in_its_own_process(child: Path) -> None:
    gpus = make_gpu_machine()
    executable(child, 'echo "$@" > $0.asked', f"echo '{{\"answer\": {gpus.model_dump_json()}}}'")
    assert machine.detect(library=PRESENT) == gpus
    asked = child.with_name("python.asked")
    assert asked.read_text() == "-P -m perfsuite.node.machine\n"


def test_sees_users_of_gpus_in_its_own_process(child: Path) -> None:
    executable(child, 'echo "$@" > $0.asked', 'echo a warning; echo \'{"answer": ["9 MiB of GPU 0"]}\'')
    assert quiet.see_gpus(4, library=PRESENT) == ["9 MiB of GPU 0"]
    assert child.with_name("python.asked").read_text() == "-P -m perfsuite.launch.quiet 4\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("exec sleep 600", r"NVML did not answer within 0 s .* Look at dmesg"),
        ('echo \'{"error": "GPU 3 cannot be read"}\'', "^GPU 3 cannot be read$"),
        ("echo oh no >&2; exit 1", r"the process that calls NVML failed: oh no\. To see .*python -P -m "),
        ("exit 3", "failed: exit code 3"),
    ],
)
def test_unresponsive_child_is_an_error(child: Path, line: str, said: str) -> None:
    assert nvml_process.ANSWER_S == 30
    executable(child, line)
    answer_s = 0.0 if "sleep" in line else nvml_process.ANSWER_S
    with pytest.raises(MachineError, match=said):
        nvml_process.ask("perfsuite.node.machine", answer_s=answer_s)


def test_an_error_of_the_child_is_raised(child: Path) -> None:
    executable(child, 'echo \'{"error": "GPU 3 cannot be read"}\'')
    for asked in (lambda: machine.detect(library=PRESENT), lambda: quiet.see_gpus(1, library=PRESENT)):
        with pytest.raises(MachineError, match=r"^GPU 3 cannot be read$"):
            asked()


@pytest.mark.usefixtures("child")
def test_starts_no_process_without_nvml() -> None:
    with pytest.raises(MachineError, match="the users of the GPUs are unknown"):
        quiet.see_gpus(1, library=ABSENT)
    assert machine.detect(library=ABSENT).device == "cpu"


@pytest.mark.usefixtures("child")
def test_starts_no_process_for_hidden_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert machine.detect(library=PRESENT).device == "cpu"


def test_a_child_prints_its_answer_or_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    def lost() -> None:
        raise MachineError("GPU 3 cannot be read")

    nvml_process.answer(lambda: ["2 GPUs"])
    nvml_process.answer(lost)
    assert capsys.readouterr().out == '{"answer": ["2 GPUs"]}\n{"error": "GPU 3 cannot be read"}\n'


@pytest.mark.launch
def test_a_real_child_answers() -> None:
    assert Machine.model_validate(nvml_process.ask("perfsuite.node.machine")) == machine.detect_here()
    if not nvml_process.has_library():
        with pytest.raises(
            MachineError, match="the users of the GPUs are unknown: NVMLError_LibraryNotFound"
        ):
            nvml_process.ask("perfsuite.launch.quiet", "1")
