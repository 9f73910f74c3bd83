"""Whether two sides compute the same, by tokens and dtypes, and what of it could not be compared. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from perfsuite.results.baseline import Baseline, BaselineLaunch, from_runs
from perfsuite.results.count_baseline import CountBaseline
from perfsuite.results.rank_report import Dtypes
from perfsuite.results.run import Run
from perfsuite.verdict.loss import UNCLIPPED

DIGITS: Mapping[str, float] = {
    "float64": 52,
    "complex128": 52,
    "float32": 23,
    "complex64": 23,
    "float16": 10,
    "complex32": 10,
    "bfloat16": 7,
    **dict.fromkeys(("int8", "uint8", "qint8", "quint8"), 4),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz"), 3),
    **dict.fromkeys(("float8_e5m2", "float8_e5m2fnuz"), 2),
    **{f"{sign}int{bits}": (bits - 1) / 2 for sign in ("", "u") for bits in range(1, 8)},
    "quint4x2": 1.5,
    "float4_e2m1fn_x2": 1,
    "quint2x4": 0.5,
    "float8_e8m0fnu": 0,
}
"""Bits of the fraction of a number. Integers are quantised numbers, which lie between floats of their size
and the next smaller ones. Larger integers are not here: they may be indices, or packed numbers."""
MOVED = 1e-6  # share of all elements that must change their precision: padding of shards may do so
FEWEST = 3  # values of tokens on both sides together that show that they do not vary from launch to launch
TOKENS = "tokens_given"
NAMES = {  # of what may be recorded on one side alone
    UNCLIPPED: "the norm of the gradients before clipping",
    TOKENS: "the tokens that the model is given in a step",
    "dtypes": "the dtypes of weights, gradients and optimizer state",
}


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What the launches of one side computed, as far as it was recorded."""

    launches: Sequence[BaselineLaunch]
    dtypes: Dtypes
    is_dry: bool = False  # nothing was computed, and nothing varies from run to run

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Computed":
        """What these launches computed; dtypes are those of the newest."""
        return cls(launches=from_runs(runs).launches, dtypes=runs[-1].dtypes, is_dry=runs[-1].dry)

    @classmethod
    def of_baseline(cls, baseline: Baseline) -> "Computed":
        """What the launches of a baseline computed."""
        return cls(launches=baseline.launches, dtypes=baseline.dtypes)

    @classmethod
    def of_counts(cls, baseline: CountBaseline) -> "Computed":
        """What the launches of a baseline of counts computed."""
        return cls(launches=baseline.computed, dtypes=baseline.dtypes)

    def values(self, figure: str) -> list[float]:
        """A figure of each launch that has it."""
        return [value for each in self.launches if (value := each.figures.get(figure)) is not None]

    def has(self, name: str) -> bool:
        """Whether one of `NAMES` was recorded."""
        return bool(self.dtypes) if name == "dtypes" else bool(self.values(name))


def other_computation(then: Computed, now: Computed, whose: str) -> list[str]:
    """What makes these launches another computation than that of `whose`: other tokens, less precision."""
    return [
        *(f"less precise than in {whose}: {change}" for change in less_precise(then.dtypes, now.dtypes)),
        *_other_tokens(then, now, whose),
    ]


def _other_tokens(then: Computed, now: Computed, whose: str) -> Iterator[str]:
    before, today = then.values(TOKENS), now.values(TOKENS)
    is_steady = len(set(before)) == len(set(today)) == 1
    is_told = now.is_dry or len(before) + len(today) >= FEWEST
    if is_steady and is_told and before[0] != today[0]:
        yield (
            f"other tokens than in {whose}: the model was given {today[0]:.0f} in the second step, and "
            f"{before[0]:.0f} there"
        )


def may_have_other_tokens(then: Computed, now: Computed) -> bool:
    """Whether the first launches have other tokens: these may vary from launch to launch."""
    before, today = then.values(TOKENS), now.values(TOKENS)
    return bool(before and today) and before[0] != today[0]


def less_precise(then: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What has fewer bits than before, as `optimizer state: float32 -> bfloat16`."""
    return [_change(what, then, now) for what in _both(then, now) if _moved(then[what], now[what]) < 0]


def more_precise(then: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What has more bits than before, and nothing fewer."""
    return [_change(what, then, now) for what in _both(then, now) if _moved(then[what], now[what]) > 0]


def _both(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return [what for what in then if what in now]


def _moved(then: Mapping[str, int], now: Mapping[str, int]) -> int:
    """-1 if some elements have fewer bits than before, 1 if some have more and none fewer, else 0.

    Elements have moved where there are fewer above a precision and more below it. A part that only grew or
    shrank, as where more layers train, has moved nothing.
    """
    least = MOVED * max(_known(then).total(), _known(now).total())
    has_risen = False
    for digits in sorted(set(DIGITS.values())):
        (low_then, high_then), (low_now, high_now) = (_split(side, digits) for side in (then, now))
        if min(high_then - high_now, low_now - low_then) > least:
            return -1
        has_risen = has_risen or min(high_now - high_then, low_then - low_now) > least
    return int(has_risen)


def _split(elements: Mapping[str, int], digits: float) -> tuple[int, int]:
    """The number of elements that have at most so many digits, and of those that have more."""
    numbers = _known(elements)
    low = sum(count for name, count in numbers.items() if DIGITS[name] <= digits)
    return low, numbers.total() - low


def _known(elements: Mapping[str, int]) -> Counter[str]:
    return Counter({name: count for name, count in elements.items() if name in DIGITS and count})


def _of_unknown_precision(then: Dtypes, now: Dtypes) -> Iterator[str]:
    """Elements of dtypes that `DIGITS` lacks, where there are not as many as before."""
    for what in _both(then, now):
        for name in sorted((then[what].keys() | now[what].keys()) - DIGITS.keys()):
            before, today = (side[what].get(name, 0) for side in (then, now))
            if before != today:
                yield f"{what}: {before:,} -> {today:,} elements of {name}"


def _change(what: str, then: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> str:
    return f"{what}: {_told(then[what])} -> {_told(now[what])}"


def _told(elements: Mapping[str, int]) -> str:
    numbers = _known(elements)
    if len(numbers) == 1:
        return next(iter(numbers))
    return ", ".join(f"{name} {100 * count / numbers.total():.3g}%" for name, count in numbers.most_common())


def differences(then: Computed, now: Computed, whose: str) -> list[str]:
    """What is not as in `whose` and is no failure: more precision, and what one side did not record."""
    lacking = [name for key, name in NAMES.items() if now.has(key) and not then.has(key)]
    unknown = list(_of_unknown_precision(then.dtypes, now.dtypes))
    unseen = [name for key, name in NAMES.items() if then.has(key) and not now.has(key)]
    return [
        *(f"more precise than in {whose}: {change}" for change in more_precise(then.dtypes, now.dtypes)),
        *([f"not compared, as the precision is not known: {'; '.join(unknown)}"] if unknown else []),
        *([f"not compared, as {whose} does not have it: {'; '.join(lacking)}"] if lacking else []),
        *([f"not compared, as only {whose} has it: {'; '.join(unseen)}"] if unseen else []),
    ]
