"""Describe the expected time of a step, how launches compare with this time, and the forecast. Pure."""

from __future__ import annotations

from perfsuite.case.case import Unit
from perfsuite.report.text import plural
from perfsuite.results.amounts import duration, rate
from perfsuite.results.dry_facts import DryFacts, Expected, Forecast
from perfsuite.results.session_file import Measurement

LEAST_PART = 0.002  # parts of the expected time are named if they exceed this share of the step


def of_dry_run(facts: DryFacts, unit: Unit) -> list[str]:
    """Describe the expected time and the forecast of a step, or the reasons why they are missing."""
    lines = []
    if facts.expected is not None:
        step = facts.expected
        takes = f"{duration(step.step_s)} ({rate(step.tokens_per_s)} {unit}/s)"
        lines += [f"a step is expected to take {takes}: {parts(step)}", published(step, "this speed")]
    if facts.no_expected is not None:
        lines.append(f"no expected time of a step: {facts.no_expected}")
    if facts.forecast is not None:
        lines += _forecast(facts.forecast)
    if facts.no_forecast is not None:
        lines.append(f"no forecast for this kind of GPU: {facts.no_forecast}")
    return lines


def of_launches(result: Measurement) -> list[str]:
    """Compare the speed of a case's launches with the expected speed, or say why no speed is expected.

    The result is empty without a prediction, or if the speed of the launches is not known.
    """
    facts = result.prediction
    if facts is None:
        return []
    if facts.no_expected is not None:
        return [f"no comparison with an expected speed: {facts.no_expected}"]
    share = result.expected_share
    if share is None or facts.expected is None:
        return []
    step = facts.expected
    lines = [
        f"{share:.0%} of the expected speed; {published(step, 'it')} (a hint, not judged)",
        f"parts of the expected {duration(step.step_s)} of a step: {parts(step)}",
    ]
    if facts.forecast is not None:
        step_s = step.step_s / share
        held = "in" if facts.forecast.holds(step_s) else "not in"
        lines.append(f"a step took {duration(step_s)}, which is {held} the forecast {_range(facts.forecast)}")
    return lines


def parts(step: Expected) -> str:
    """Return the parts of the expected time, except for the small parts."""
    seconds = {
        "matmuls": step.matmul_s,
        "attention": step.attention_s,
        "other kernels": step.memory_s,
        "slower kernels during communication": step.slowed_s,
        "waiting for communication": step.exposed_s,
        "waiting for the host": step.host_s,
    }
    least_s = LEAST_PART * step.step_s
    return ", ".join(f"{name} {duration(part)}" for name, part in seconds.items() if part > least_s)


def published(step: Expected, speed: str) -> str:
    """Describe which share of the expected speed published steps on this accelerator reach.

    `speed` is the name of the expected speed in the sentence, such as `it` or `this speed`.
    """
    if step.published is None:
        return f"too few steps are published to know how close this kind of accelerator comes to {speed}"
    low, high = step.published
    return f"published steps on this accelerator reach {low:.0%} to {high:.0%} of {speed}"


def _range(its: Forecast) -> str:
    return f"of {duration(its.low_s)} to {duration(its.high_s)}"


def _forecast(its: Forecast) -> list[str]:
    factors = f"the GPU takes {its.gpu_factor:.2f} times as long as expected"
    if its.host_factor is not None:
        factors += f", and the host {its.host_factor:.2f} times"
    pace = "the host can also set" if its.host_pace else "the GPU also sets"
    lines = [
        f"forecast {_range(its)} for a step on this kind of GPU (meant to hold nine times out of ten), based "
        f"on {plural(len(its.cases), 'measured case')} with the same parallelism, in which {pace} the pace. "
        f"Measurements show that {factors}"
    ]
    if its.checked:
        lines.append(
            f"of {plural(its.checked, 'earlier forecast')} with a later measurement, {its.held} held"
        )
    return lines
