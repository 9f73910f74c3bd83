from typing import Any

import pytest

from perfsuite.analysis.trace import reduced
from perfsuite.results.outcome import Profiled
from perfsuite.results.profile import TakenProfile, Work
from perfsuite.verdict.profiled import MOST_CALLS, compared, explained
from tests.traces import cpu_trace, gpu_trace, launch_profile, make_profile, taken

BEFORE = make_profile()


def plus(*works: Work, **changes: Any) -> Any:
    """Return the profile `BEFORE` with these additional operators."""
    return BEFORE.replace(operators=(*BEFORE.operators, *works), **changes)


def compare(now: Any, before: Any = BEFORE) -> Profiled:
    return compared(launch_profile(before), launch_profile(now), "the baseline")


def calls(now: Any) -> tuple[str, ...]:
    return compare(now).calls


def names(now: Any) -> list[str]:
    return [line.split()[0] for line in calls(now)]


def test_new_or_gone_calls_come_first() -> None:
    more = [Work(name="aten::mm", calls=26, us=9800), BEFORE.operators[1]]
    now = BEFORE.replace(operators=(*more, Work(name="CloneBackward0", calls=8, us=20)))
    assert explained(taken(), taken(now), "arm A").calls == (
        "CloneBackward0 0 -> 8 calls a step",
        "flash_attn::_flash_attention_forward 4 -> 0 calls a step",
        "aten::mm 24 -> 26 calls a step",
    )


def test_views_come_last_among_equal_changes() -> None:
    calls = {"permute": (80, 900), "softmax": (4, 100), "exp": (4, 200), "bmm": (24, 100)}
    now = plus(*(Work(name=f"aten::{name}", calls=count, us=us) for name, (count, us) in calls.items()))
    assert names(now) == ["aten::bmm", "aten::exp", "aten::softmax", "aten::permute"]


def test_kernels_come_after_operators() -> None:
    kernels = (*BEFORE.kernels, Work(name="softmax_warp_forward", calls=24, us=9000))
    now = BEFORE.replace(operators=(Work(name="aten::mm", calls=25, us=9100), *BEFORE.operators[1:]))
    assert names(now.replace(kernels=kernels)) == ["aten::mm", "softmax_warp_forward"]


def test_a_synchronisation_is_named_as_one() -> None:
    before, now = (reduced(gpu_trace(sync=sync), "cuda") for sync in (False, True))
    first, *others = compare(now, before).calls
    assert first == "aten::_local_scalar_dense 0 -> 1 calls a step: the host waits for the device"
    assert any("cudaStreamSynchronize 0 -> 1 calls a step" in line for line in others)


def test_unsteady_calls_are_not_compared() -> None:
    once = plus(Work(name="aten::bmm", calls=24, us=700), unsteady=("aten::bmm",))
    assert not calls(once)
    assert compare(once).notes == ("new, but not in every step, so calls cannot be compared: aten::bmm",)
    assert not compare(once, once).notes, "the baseline's steps called it as well"
    seven = [f"aten::new{number}" for number in range(7)]
    many = plus(*(Work(name=name, calls=1, us=1) for name in seven), unsteady=tuple(seven))
    assert compare(many).notes[0].endswith(f": {', '.join(seven[:5])} and 2 more")


def test_cuts_many_differences() -> None:
    now = plus(*(Work(name=f"aten::new{number}", calls=1, us=number) for number in range(9)))
    assert len(calls(now)) == MOST_CALLS + 1
    assert calls(now)[-1] == "and 4 more names with a changed number of calls"
    assert len(calls(now.replace(operators=now.operators[:-4]))) == MOST_CALLS


def test_names_the_ranks_that_differ() -> None:
    other = launch_profile(BEFORE, plus(Work(name="aten::bmm", calls=24, us=700)), BEFORE)
    ranks = compared(launch_profile(BEFORE, BEFORE, BEFORE), other, "the baseline")
    assert ranks.calls == ("aten::bmm 0 -> 24 calls a step (rank 1)",)


def test_names_the_part_that_grew_beside_others() -> None:
    split = BEFORE.split.replace(step_us=121_000, exposed_us={"all_gather": 31_800}, idle_us=19_200)
    now = BEFORE.replace(split=split, kernels=(BEFORE.kernels[0], BEFORE.kernels[1].replace(us=51_800)))
    assert compare(now).hints == (
        "hint from times: all_gather exposed 12.1 -> 31.8 ms (+19.7 of +21.0 ms)",
        "hint from times of the kernels: ncclDevKernel_AllGather_RING_LL 32.1 -> 51.8 ms (+19.7 ms)",
    )
    exposed = {"all_gather": 112_100}
    split = BEFORE.split.replace(step_us=261_000, exposed_us=exposed, compute_us=90_000, optimizer_us=30_000)
    slow = now.replace(split=split, kernels=(BEFORE.kernels[0], BEFORE.kernels[1].replace(us=132_100)))
    assert compare(slow).hints == (
        "hint from times: all_gather exposed 12.1 -> 112.1 ms (+100.0 of +161.0 ms), "
        "compute 60.0 -> 90.0 ms (+30.0 of +161.0 ms), optimizer 10.0 -> 30.0 ms (+20.0 of +161.0 ms)",
        "hint from times of the kernels: ncclDevKernel_AllGather_RING_LL 32.1 -> 132.1 ms (+100.0 ms)",
    )
    assert not calls(now)


def test_names_a_slower_cpu_collective_first() -> None:
    """Both profiles have the same calls. Only the times differ."""
    slower = [
        {**event, "dur": 480} if event.get("name") == "gloo:all_reduce" else event for event in cpu_trace()
    ]
    profiled = compare(*(reduced(trace, "cpu") for trace in (slower, cpu_trace())))
    assert not profiled.calls
    assert profiled.hints[0].startswith("hint from times: all_reduce exposed 0.3 -> 0.4 ms (+0.1 ms)")


def test_part_against_the_step_has_no_share_of_it() -> None:
    split = BEFORE.split.replace(step_us=90_000, exposed_us={"all_gather": 16_100}, compute_us=46_000)
    largest = "compute 60.0 -> 46.0 ms (-14.0 of -10.0 ms)"
    hint = f"hint from times: {largest}, all_gather exposed 12.1 -> 16.1 ms (+4.0 ms)"
    assert compare(BEFORE.replace(split=split)).hints == (hint,)
    assert compare(BEFORE).hints == ("hint from times: no part of a step changed by 3% of the step",)


NONE = "there is no profile of arm A: "
ADVICE = "record or accept a baseline with --perf-explain, to compare later regressions with its profile"
UNLIKE = "the profile of arm A has another method, device or number of ranks, so it is not compared"


@pytest.mark.parametrize(
    ("before", "now", "note"),
    [
        (taken(), TakenProfile(why_none="crash: boom"), "no profile was taken: crash: boom"),
        (None, taken(), f"{NONE}{ADVICE}"),
        (TakenProfile(why_none="unreadable"), taken(), f"{NONE}unreadable"),
        (TakenProfile(profile=launch_profile(BEFORE).replace(method="profile-0")), taken(), UNLIKE),
        (taken(BEFORE.replace(device="cpu")), taken(), UNLIKE),
    ],
)
def test_explains_why_profiles_cannot_be_compared(
    before: TakenProfile | None, now: TakenProfile, note: str
) -> None:
    assert explained(before, now, "arm A").notes == (note,)
