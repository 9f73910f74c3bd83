"""What is said of a script that could not be measured. Imports no torch."""

from __future__ import annotations

from perfsuite.errors import ScriptError
from perfsuite.results.run_dir import LAUNCH_DIR, RunDir
from perfsuite.worker.optimizers import Optimizers

CAPTURED = (
    "the script captures its optimizer's step in a CUDA graph. A replay calls no optimizer, whose step is "
    "the clock: such training cannot be measured. Capture forward and backward alone, and call "
    "optimizer.step() outside of the graph, or switch the graph off"
)


def twice(rank: int) -> str:
    """Return what is said where two processes trained as one rank."""
    return (
        f"two processes of this command trained as rank {rank}: one process of each rank is measured, and "
        "ended after its last measured step. Give each stage of training a case of its own; processes that "
        "train together need a process group"
    )


def no_optimizer(passes: int, accumulation: int) -> ScriptError:
    """Return the error of a script that made so many backward passes and no step."""
    return ScriptError(
        f"no optimizer of torch has stepped after {passes} backward passes (the case says "
        f"gradient_accumulation={accumulation}): the clock is the step of a torch.optim.Optimizer, and what "
        "trains without one cannot be measured"
    )


def no_clock(optimizers: Optimizers) -> ScriptError:
    """Return the error of a script in which the optimizer that the case names did not step."""
    return ScriptError(f"clock={optimizers.wanted!r}: no such optimizer stepped. {optimizers.summary()}")


def ended_early(steps: int, of: int, optimizers: Optimizers, run_dir: RunDir) -> ScriptError:
    """Return the error of a script that ended by itself after some `of` its steps."""
    ended = f"the script ended after {steps} of {of} optimizer steps"
    several = f". {optimizers.summary()}" if len(optimizers.seen) > 1 else ""
    if run_dir.is_first:
        return ScriptError(
            f"{ended}: lower max_warmup_steps or steps, or give it more data; or, where it goes on from "
            f"files of an earlier run, have it keep them in {LAUNCH_DIR}, a new directory in each launch"
            f"{several}"
        )
    return ScriptError(
        f"{ended}, but not so in the launch before: that may have left files which this one went on from. "
        f"Have the script keep its files in {LAUNCH_DIR} (in its arguments, command or env), a new directory "
        f"in each launch{several}"
    )
