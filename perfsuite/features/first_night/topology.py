"""Read from nvidia-smi how the GPUs are connected, and from nccl-tests how fast an all-reduce is."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from perfsuite.doctor.machine import gpus_on_bus
from perfsuite.doctor.rows import Row, failed, passed, unknown
from perfsuite.features.first_night.night import ASK_S, Night, answer_of, not_run
from perfsuite.node.machine import HIDDEN
from perfsuite.report.text import plural

TOPOLOGY = "topology"  # name of the row with the links
NCCL_TESTS = "nccl-tests"
REDUCE = "all_reduce_perf"  # a program of nccl-tests
REDUCED = "64M"  # bytes of an all-reduce, the same as in perfsuite's own probe
BANDWIDTH = "algbw"  # header of the column with the rate
MIN_SHARE = 0.8  # perfsuite's probe must reach this share of the rate of nccl-tests


def topology_rows(
    night: Night, directory: Path, *, root: Path = Path("/"), deadline_s: float = ASK_S
) -> Iterator[Row]:
    """Describe the links between the GPUs, and keep everything that nvidia-smi prints.

    Without visible GPUs, /sys under `root` shows whether the machine has any. nvidia-smi counts as failed if
    it has not ended after `deadline_s`.
    """
    if night.machine.device == "cpu":
        yield _without_gpu(night.machine.note, gpus_on_bus(root))
        return
    if shutil.which("nvidia-smi") is None:
        advice = "install the driver's tools, or start the container with NVIDIA_DRIVER_CAPABILITIES=utility"
        yield not_run(TOPOLOGY, "nvidia-smi is not in PATH", advice)
        return
    for name, words in ((TOPOLOGY, ("topo", "-m")), ("nvidia-smi", ("-q",))):
        file = directory / f"{name}.txt"
        text = answer_of(("nvidia-smi", *words), file, deadline_s=deadline_s)
        if text is None:
            reason = (file.read_text().strip().splitlines() or ["it failed without a message"])[-1]
            yield not_run(name, f"nvidia-smi {' '.join(words)}: {reason}", "look at dmesg")
        else:
            yield passed(name, links(text) if name == TOPOLOGY else f"its full report is in {file}")


def _without_gpu(why: str | None, there: int) -> Row:
    """Return the row of a machine on which no GPU was found, although some might be there."""
    if not there or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return not_run(TOPOLOGY, "there is no GPU" if not there else "CUDA_VISIBLE_DEVICES hides every GPU")
    advice = "in a container, set NVIDIA_DRIVER_CAPABILITIES=compute,utility; otherwise look at nvidia-smi"
    return failed(TOPOLOGY, f"{plural(there, 'NVIDIA GPU')} on the PCI bus, but {why}", advice)


def links(text: str) -> str:
    """Summarize the matrix of `nvidia-smi topo -m`: the number of GPU pairs with each kind of link."""
    kinds = Counter[str]()
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]):
            number = int(row[0].removeprefix("GPU"))
            kinds.update(row[1 : number + 1])  # below the diagonal: each pair once
    if not kinds:
        return "one GPU, so there are no links between GPUs"
    pairs = sum(kinds.values())
    if pairs == 1:
        return f"{next(iter(kinds))} between the two GPUs"
    if len(kinds) == 1:
        return f"{next(iter(kinds))} between all {pairs} pairs of GPUs"
    return ", ".join(f"{kind} between {count} of {pairs} pairs" for kind, count in kinds.most_common())


def nccl_rows(night: Night, directory: Path, ours: Row | None) -> Iterator[Row]:
    """Compare the rate of perfsuite's own all-reduce (the doctor's row `ours`) with that of nccl-tests."""
    if night.machine.device == "cpu" or night.machine.devices == 1:
        yield not_run(NCCL_TESTS, "it needs two GPUs")
        return
    if shutil.which(REDUCE) is None:
        yield not_run(NCCL_TESTS, f"{REDUCE} is not in PATH", "build github.com/NVIDIA/nccl-tests")
        return
    words = (REDUCE, "-b", REDUCED, "-e", REDUCED, "-g", str(night.machine.devices))
    text = answer_of(words, directory / f"{NCCL_TESTS}.txt")
    theirs = None if text is None else reduced_gb_s(text)
    if theirs is None:
        yield not_run(NCCL_TESTS, f"{REDUCE} failed: see {directory / f'{NCCL_TESTS}.txt'}")
        return
    own = None if ours is None else re.match(r"[\d.]+", ours.found)
    observed = f"all-reduce of {REDUCED} at {theirs:.4g} GB/s"
    if own is None:
        yield unknown(NCCL_TESTS, f"{observed}, but the doctor measured no all_reduce_gb_s to compare with")
        return
    share = float(own[0]) / theirs
    observed += f"; perfsuite's own all-reduce reaches {share:.0%} of this rate"
    if share >= MIN_SHARE:
        yield passed(NCCL_TESTS, observed)
    else:
        advice = (
            f"at least {MIN_SHARE:.0%} is expected: compare the NCCL version and variables of {REDUCE} with "
            "those of torch"
        )
        yield unknown(NCCL_TESTS, observed, advice)


def reduced_gb_s(text: str) -> float | None:
    """Return the out-of-place algorithm bandwidth in the output of `all_reduce_perf`, or None."""
    column: int | None = None
    for line in text.splitlines():
        words = line.split()
        if words[:2] == ["#", "size"] and BANDWIDTH in words:
            # The header begins with an additional word, #. The first of the two bandwidth columns is that of
            # the out-of-place all-reduce.
            column = words.index(BANDWIDTH) - 1
        elif column is not None and len(words) > column and words[0].isdigit():
            return _number(words[column])
    return None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # such as N/A
        return None
