"""Run all checks of a machine. The last checks launch a small case."""

from collections.abc import Callable

from perfsuite.case.hardware import Machine
from perfsuite.doctor import gpus, machine, torch_checks
from perfsuite.doctor.launches import launch_rows
from perfsuite.doctor.rows import Row
from perfsuite.extensions import Extension
from perfsuite.launch.quiet import Neighbours
from perfsuite.worker.probes.doctor_facts import DoctorFile


def examine(
    detected: Machine,
    *,
    quick: bool,
    load_command: Callable[[Extension], object],
    say: Callable[[str], None] = lambda text: None,
    neighbours: Neighbours | None = None,
    probe: Callable[..., DoctorFile | Row] = torch_checks.probe,
    launch: Callable[[Machine, Callable[[str], None]], list[Row]] = launch_rows,
) -> list[Row]:
    """Run all checks of a machine. This can take minutes. `say` is called to report progress.

    `neighbours` looks for other users of the machine. `probe` tries torch in another process, and `launch`
    makes the launches.
    """
    rows = [
        *machine.machine_rows(detected),
        *machine.system_rows(detected),
        *gpus.gpu_rows(detected),
        machine.neighbours_row(detected, neighbours),
        machine.extensions_row(load_command),
    ]
    say("importing torch" if quick else "training a small model in one process, with and without the clock")
    probed = probe(detected, quick=quick)
    if isinstance(probed, Row):
        return [*rows, probed]
    rows += torch_checks.torch_rows(probed, detected)
    if probed.memory is not None and probed.clock is not None:
        rows.append(torch_checks.memory_row(probed.memory, probed.expected_peak))
        rows += torch_checks.clock_rows(probed.clock)
    broken = {row.check for row in rows if row.status == "fail"}
    if not quick and not broken & {"torch and GPUs", "extensions"}:  # these failures prevent launches
        rows += launch(detected, say)
    return rows
