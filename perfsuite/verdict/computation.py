"""Compare what two sides compute: their tokens, dtypes and settings. List what could not be compared. Pure.

The sides are the launches of a case and its baseline, or the two arms of a comparison.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from perfsuite.results.baseline import Baseline, BaselineLaunch, from_runs, values_of
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
"""Bits of the fraction of each dtype. Integers are assumed to be quantised numbers: int8 and int4 rank above
the floats of their own size and below those of the next larger size. Larger integers are left out, because
they can be indices or packed numbers."""
PRECISE = {"ieee": 23, "tf32": 10, "bf16": 7}  # bits of the fraction in fp32 matmuls, by torch's setting
PRODUCTS = ("fp32_matmul", "fp32_convolution")  # settings whose value is a key of `PRECISE`
LAYOUT = (
    *("wrapper", "sharding", "parallelism", "mesh", "world_size", "rank_holds", "offload", "pipeline"),
    *("experts_per_rank", "lora", "quantised_layers"),
)
"""Settings that affect how many elements of a model the ranks hold. If one differs, totals cannot be
compared."""
MOVED = 1e-6  # smaller changes, as a share of all elements, do not count: padding of shards can cause them
FEWEST = 3  # minimum number of launches (both sides together) that show whether the number of tokens varies
TOKENS = "tokens_given"
NAMES = {  # names of values that can be recorded on one side only
    UNCLIPPED: "the norm of the gradients before clipping",
    TOKENS: "the number of tokens that the model is given in a step",
    "dtypes": "the dtypes of weights, gradients and optimizer state",
}


@dataclass(frozen=True, kw_only=True)
class Computed:
    """The recorded facts about what the launches of one side compute."""

    launches: Sequence[BaselineLaunch]
    dtypes: Dtypes
    settings: Mapping[str, str] = field(default_factory=dict)  # the settings in `Observed`
    is_dry: bool = False  # whether these are dry runs, which compute no values and do not vary

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "Computed":
        """Return the facts about these launches, with dtypes and settings of the newest launch."""
        newest = runs[-1]
        return cls(
            launches=from_runs(runs).launches,
            dtypes=newest.dtypes,
            settings={} if newest.observed is None else newest.observed.settings,
            is_dry=newest.dry,
        )

    @classmethod
    def of_baseline(cls, baseline: Baseline) -> "Computed":
        """Return the facts about a baseline's launches."""
        settings = {} if baseline.observed is None else baseline.observed.settings
        return cls(launches=baseline.launches, dtypes=baseline.dtypes, settings=settings)

    @classmethod
    def of_counts(cls, baseline: CountBaseline) -> "Computed":
        """Return the facts about the launches of a baseline of counts."""
        return cls(launches=baseline.computed, dtypes=baseline.dtypes, settings=baseline.settings)

    def values(self, figure: str) -> list[float]:
        """Return the values of a figure in the launches that have it."""
        return values_of(self.launches, figure)

    def has(self, name: str) -> bool:
        """Return whether the value `name`, a key of `NAMES`, was recorded."""
        return bool(self.dtypes) if name == "dtypes" else bool(self.values(name))


def other_computation(then: Computed, now: Computed, whose: str) -> list[str]:
    """List the reasons why `now` computes something other than `then`.

    Possible reasons are less precision, fewer parameters, different trained parameters, and another number
    of tokens. In messages, the text `whose`, such as "the baseline", refers to the side `then`.
    """
    less = [*less_precise(then.dtypes, now.dtypes), *_less_precise_products(then, now)]
    return [
        *(f"less precise than in {whose}: {change}" for change in less),
        *_fewer_parameters(then, now, whose),
        *_other_trained(then, now, whose),
        *_other_tokens(then, now, whose),
    ]


def _less_precise_products(then: Computed, now: Computed) -> Iterator[str]:
    for name in PRODUCTS:
        before, today = (side.settings.get(name, "") for side in (then, now))
        if PRECISE.get(today, 0) < PRECISE.get(before, 0) and today in PRECISE:
            yield f"{name}: {before} -> {today}"


def _fewer_parameters(then: Computed, now: Computed, whose: str) -> Iterator[str]:
    before, today = _totals("parameters", then, now)
    if today < (1 - MOVED) * before:
        yield f"a smaller model than in {whose}: {before:,} -> {today:,} elements of parameters on all ranks"


def _other_trained(then: Computed, now: Computed, whose: str) -> Iterator[str]:
    before, today = (side.settings.get("trained") for side in (then, now))
    if before is not None and today is not None and before != today:
        yield f"different parameters are trained than in {whose}: {before} -> {today}"


def does_less(then: Computed, now: Computed, whose: str) -> list[str]:
    """List signs that the training differs. If there are any, less work does not count as `improved`."""
    signs = []
    before, today = _totals("gradients", then, now)
    if today < (1 - MOVED) * before:
        signs.append(f"fewer gradients than in {whose}: {before:,} -> {today:,} elements on all ranks")
    kinds = [side.settings.get("optimizer", "").partition(" ")[0] for side in (then, now)]
    if all(kinds) and kinds[0] != kinds[1]:
        signs.append(f"another optimizer than in {whose}: {kinds[0]} -> {kinds[1]}")
    return signs


def _totals(what: str, then: Computed, now: Computed) -> tuple[int, int]:
    """Return the total number of elements of `what` (parameters or gradients) on each side.

    Returns (0, 0) if the sides cannot be compared.
    """
    is_alike = all(then.settings.get(name) == now.settings.get(name) for name in LAYOUT)
    if not is_alike or what not in then.dtypes or what not in now.dtypes:
        return 0, 0
    return sum(then.dtypes[what].values()), sum(now.dtypes[what].values())


def _other_tokens(then: Computed, now: Computed, whose: str) -> Iterator[str]:
    before = then.values(TOKENS)
    today = now.values(TOKENS)
    is_steady = len(set(before)) == len(set(today)) == 1
    is_told = now.is_dry or len(before) + len(today) >= FEWEST
    if is_steady and is_told and before[0] != today[0]:
        yield (
            f"a different number of tokens than in {whose}: in the second step, the model was given "
            f"{today[0]:.0f} instead of {before[0]:.0f}"
        )


def may_have_other_tokens(then: Computed, now: Computed) -> bool:
    """Return whether the first launches of the two sides have different numbers of tokens.

    The difference can be due to chance.
    """
    before = then.values(TOKENS)
    today = now.values(TOKENS)
    return bool(before and today) and before[0] != today[0]


def less_precise(then: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> list[str]:
    """List the tensors whose elements lost bits, such as `optimizer state: float32 -> bfloat16`."""
    return [_change(what, then, now) for what in _both(then, now) if _moved(then[what], now[what]) < 0]


def more_precise(then: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> list[str]:
    """List the tensors in which some elements gained bits, and no element lost any."""
    return [_change(what, then, now) for what in _both(then, now) if _moved(then[what], now[what]) > 0]


def _both(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return [what for what in then if what in now]


def _moved(then: Mapping[str, int], now: Mapping[str, int]) -> int:
    """Return -1 if some elements lost bits, 1 if some gained bits and none lost any, and otherwise 0.

    For a number of bits n, let `high` be the number of elements with more than n bits, and `low` the number
    of all others. Elements have lost bits if, for some n, `high` fell and `low` rose. If the number of
    elements only grew or shrank, for example because more layers are trained, the result is 0.
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
    """Return the number of elements with at most `digits` bits, and the number of elements with more bits."""
    numbers = _known(elements)
    low = sum(count for name, count in numbers.items() if DIGITS[name] <= digits)
    return low, numbers.total() - low


def _known(elements: Mapping[str, int]) -> Counter[str]:
    return Counter({name: count for name, count in elements.items() if name in DIGITS and count})


def _of_unknown_precision(then: Dtypes, now: Dtypes) -> Iterator[str]:
    """Yield changes in the number of elements whose dtype is not in `DIGITS`."""
    for what in _both(then, now):
        for name in sorted((then[what].keys() | now[what].keys()) - DIGITS.keys()):
            before, today = (side[what].get(name, 0) for side in (then, now))
            if before != today:
                yield f"{what}: {before:,} -> {today:,} elements of {name}"


def _change(what: str, then: Mapping[str, Mapping[str, int]], now: Mapping[str, Mapping[str, int]]) -> str:
    return f"{what}: {_elements_text(then[what])} -> {_elements_text(now[what])}"


def _elements_text(elements: Mapping[str, int]) -> str:
    numbers = _known(elements)
    if len(numbers) == 1:
        return next(iter(numbers))
    return ", ".join(f"{name} {100 * count / numbers.total():.3g}%" for name, count in numbers.most_common())


def differences(then: Computed, now: Computed, whose: str) -> list[str]:
    """List the differences that are not failures.

    Such a difference is higher precision, a change in dtypes of unknown precision, or a value that one side
    did not record. In messages, the text `whose` refers to the side `then`.
    """
    lacking = [name for key, name in NAMES.items() if now.has(key) and not then.has(key)]
    unknown = list(_of_unknown_precision(then.dtypes, now.dtypes))
    unseen = [name for key, name in NAMES.items() if then.has(key) and not now.has(key)]
    return [
        *(f"more precise than in {whose}: {change}" for change in more_precise(then.dtypes, now.dtypes)),
        *([f"not compared, because the precision is unknown: {'; '.join(unknown)}"] if unknown else []),
        *([f"not compared, because missing in {whose}: {'; '.join(lacking)}"] if lacking else []),
        *([f"not compared, because recorded only in {whose}: {'; '.join(unseen)}"] if unseen else []),
    ]
