"""Test `perfsuite.phase` and phases that a case names.

`frameworks/test_events.py` launches scripts with them.
"""

import sys
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import pytest

import perfsuite
from perfsuite.errors import CaseError, MismatchError
from perfsuite.worker.hooks.named import Search
from perfsuite.worker.spans import phases
from perfsuite.worker.spans.phases import NamedPhase
from perfsuite.worker.spans.recording import Meters, Spans
from tests.worker.loops import in_a_thread

MODULE = "a_users_module"


class Clock:
    now = 0.0


@pytest.fixture
def spans() -> Spans:
    """Return the spans of this thread, which trains. Time passes only in `work`.

    A fixture of `conftest.py` removes them from the process afterwards.
    """
    spans = Spans(Meters(now=lambda: Clock.now))
    spans.train(lambda: 7)
    phases.spans = spans
    return spans


def work(seconds: float = 1) -> str:
    Clock.now += seconds
    return "done"


async def wait() -> None: ...


def give() -> Iterator[int]:
    yield 1


async def stream() -> AsyncIterator[int]:
    yield 1


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType(MODULE)
    module.generate = lambda: work(3)
    module.NUMBER = 7
    module.wait = wait
    monkeypatch.setitem(sys.modules, MODULE, module)
    return module


def test_a_phase_without_a_launch_changes_nothing() -> None:
    assert phases.spans is None
    with perfsuite.phase("rollout"):
        assert perfsuite.phase("score")(work)() == "done"


def test_a_block_is_a_phase(spans: Spans) -> None:
    with perfsuite.phase("rollout"):
        work(2)
    assert (spans.times()["rollout"].seconds, spans.times()["rollout"].steps) == ((2,), (7,))


def test_each_decorated_call_is_a_phase(spans: Spans) -> None:
    rollout = perfsuite.phase("rollout")(work)
    assert (rollout(2), rollout(seconds=3)) == ("done", "done")
    assert spans.times()["rollout"].seconds == (2, 3)


def test_static_and_class_methods_may_be_phases(spans: Spans) -> None:
    class Model:
        @perfsuite.phase("score")
        @staticmethod
        def score(seconds: float) -> str:
            return work(seconds)

        @perfsuite.phase("load")
        @classmethod
        def load(cls) -> type:
            work(3)
            return cls

    assert (Model().score(2), Model.load()) == ("done", Model)
    assert {name: times.seconds for name, times in spans.times().items()} == {"score": (2,), "load": (3,)}


def test_a_class_is_no_phase() -> None:
    with pytest.raises(CaseError, match="Clock is a class: mark its methods"):
        perfsuite.phase("score")(Clock)


def test_one_phase_in_two_threads_ends_in_each(spans: Spans) -> None:
    phase = perfsuite.phase("rollout")
    with phase:
        in_a_thread(phase.__enter__)  # when this thread leaves the phase, the other thread is still in it
        work()
    assert spans.times()["rollout"].seconds == (1,)


def test_one_phase_may_be_entered_again_and_again(spans: Spans) -> None:
    rollout = perfsuite.phase("rollout")
    for _ in range(2):
        with rollout:
            work()
    assert spans.times()["rollout"].seconds == (1, 1)


def test_a_phase_inside_itself_is_one(spans: Spans) -> None:
    rollout = perfsuite.phase("rollout")
    with rollout:
        with rollout:
            work(2)
        work(3)
    assert spans.times()["rollout"].seconds == (5,)


def tokens() -> Iterator[str]:
    with perfsuite.phase("tokenize"):
        for _ in range(2):
            yield work(1)


def in_another_thread(batches: Iterator[str]) -> list[str]:
    """Return the batches that another thread gets. It leaves the phase in which this thread has begun."""
    given: list[str] = []
    in_a_thread(lambda: given.extend(batches))
    return given


def test_phase_without_a_launch_may_change_threads() -> None:
    batches = tokens()
    next(batches)
    assert in_another_thread(batches) == ["done"]


def test_phase_that_changes_threads_is_left_out(spans: Spans) -> None:
    for _ in range(2):
        [*tokens()]
    batches = tokens()
    next(batches)
    in_another_thread(batches)
    assert (spans.times()["tokenize"].seconds, spans.counts()["tokenize"].occurrences) == ((2, 2), None)
    assert spans.notes == ["tokenize: 1 ended in another thread and does not count"]


def test_a_phase_left_without_entering_is_harmless(spans: Spans) -> None:
    perfsuite.phase("rollout").__exit__(None)
    assert spans.times() == {}


def test_a_suspended_phase_ends_no_phase_around_it(spans: Spans) -> None:
    batches = tokens()
    next(batches)
    with perfsuite.phase("generate"):
        assert len([*batches]) == 1  # the generator leaves its phase, which is older
        work(5)
        with perfsuite.phase("generate"):
            work(1)
    assert spans.times()["generate"].seconds == (7,)


def test_error_passes_through_a_phase_and_ends_it(spans: Spans) -> None:
    with pytest.raises(ValueError, match="mine"), perfsuite.phase("rollout"):
        raise ValueError("mine")
    assert spans.times() == {}
    assert spans.notes == ["rollout: 1 ended with an exception (ValueError) and does not count"]


def test_what_is_compiled_has_no_phases(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    """A phase in compiled code would break the graph, or end a script with `fullgraph=True`."""
    monkeypatch.setattr(phases, "is_compiling", lambda: True)

    with phases.phase("rollout"):
        pass

    assert spans.times() == {}


@pytest.mark.usefixtures("spans")
def test_giving_up_in_a_phase_does_no_harm() -> None:
    def give_up() -> str:
        phases.spans = None
        return "done"

    assert perfsuite.phase("rollout")(give_up)() == "done"
    with perfsuite.phase("rollout"):
        give_up()


@pytest.mark.parametrize("function", [wait, give, stream])
def test_refuses_a_function_that_only_starts_work(function: Any) -> None:
    with pytest.raises(CaseError, match=r"^phase\('rollout'\): \w+ is a generator or async"):
        perfsuite.phase("rollout")(function)


def test_calls_of_a_named_function_are_a_phase(spans: Spans, module: Any) -> None:
    named = NamedPhase("rollout", f"{MODULE}:generate")
    Search([named]).begin()
    assert module.generate() == "done"
    named.check()
    assert spans.times()["rollout"].seconds == (3,)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "nothing",
            f"'nothing' does not exist in '{MODULE}'. Name a function or method",
        ),
        ("NUMBER", f"'NUMBER' is not a function or method of '{MODULE}'"),
        ("wait", "is a generator or async function: calling it only begins the work"),
    ],
)
def test_a_name_of_no_function_is_refused(module: ModuleType, name: str, said: str) -> None:
    named = NamedPhase("rollout", f"{MODULE}:{name}")
    Search([named]).end()
    with pytest.raises(MismatchError) as error:
        named.check()
    assert str(error.value).startswith(f"phases={{'rollout': '{MODULE}:{name}'}}: {said}")


def test_waits_for_a_module_not_yet_imported() -> None:
    NamedPhase("rollout", "elsewhere:generate").check()
