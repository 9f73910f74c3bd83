from perfsuite.case.case import Unit
from perfsuite.report.progress import Progress


class Screen:
    """Records the lines that a user sees. Tests set its clock."""

    def __init__(self, cases: int, *, terminal: bool) -> None:
        self.now = 100.0
        self.lines: list[str] = []
        self.lives: list[str | None] = []
        self.progress = Progress(self.lines.append, self.lives.append, cases, terminal, lambda: self.now)

    def steps(self, *seen: tuple[float, int], tokens: int = 256) -> None:
        """Report steps. Each item of `seen` has the seconds before a report and the number of the step."""
        for seconds, step in seen:
            self.now += seconds
            self.progress.step(step, tokens)

    def launch(self, case_id: str, seconds: float) -> None:
        self.progress.begin(case_id, 20, 1)
        self.now += seconds
        self.progress.end("passed")


def test_log_has_a_line_for_each_launch() -> None:
    screen = Screen(2, terminal=False)
    for launch, seconds in ((1, 10), (2, 5)):
        screen.progress.begin("case-a", 20, launch)
        screen.steps((seconds, 0), (0, 5))
    screen.progress.end("recorded")
    screen.launch("case-b", 1.25)
    assert screen.lines == [
        "perfsuite: [1/2] case-a begins",
        "perfsuite: [1/2] case-a launch 2 begins",
        "perfsuite: [1/2] case-a recorded after 2 launches in 15.0 s; about 15 s for 1 more case",
        "perfsuite: [2/2] case-b begins",
        "perfsuite: [2/2] case-b passed in 1.2 s",
    ]


def test_final_line_says_whether_the_work_is_the_same() -> None:
    screen = Screen(1, terminal=False)
    screen.progress.begin("case-a", 20, 1)
    screen.progress.end("unhealthy", is_same_work=True)
    assert screen.lines[-1] == "perfsuite: [1/1] case-a unhealthy in 0.0 s, same work as before"


def test_terminal_has_a_live_and_a_final_line() -> None:
    screen = Screen(2, terminal=True)
    screen.progress.begin("case-a", 20, 1)
    screen.steps((3, 0), (1, 4), (2, 8))
    screen.progress.end("passed")
    assert screen.lines == ["perfsuite: [1/2] case-a passed in 6.0 s; about 6 s for 1 more case"]
    assert screen.lives == [
        "[1/2] case-a starting for 3 s",
        "[1/2] case-a step 4 of 20",
        "[1/2] case-a step 8 of 20, 512 tokens/s, 6 s left",
        None,
    ]


def test_launch_has_a_rate_once_steps_have_passed() -> None:
    def line_after(*seen: tuple[float, int], unit: Unit = "tokens") -> str:
        screen = Screen(2, terminal=True)
        for case in ("case-a", "case-b"):
            screen.progress.begin(case, 20, 1, unit)
            screen.steps(*seen, tokens=1_000_000)
            line = str(screen.lives[-1])
            screen.steps((3, 19))
        return line.removeprefix("[2/2] case-b ")

    assert line_after((0, 4)) == line_after((0, 4), (1, 4)) == "step 4 of 20"
    assert line_after((0, 4), (0, 8)) == "step 8 of 20"
    assert line_after((0, 4), (1, 4), (1, 6)) == "step 6 of 20, 1,000,000 tokens/s, 14 s left"
    assert line_after((0, 4), (2, 6), unit="samples") == "step 6 of 20, 1,000,000 samples/s, 14 s left"


def test_time_left_extrapolates_the_mean() -> None:
    screen = Screen(5, terminal=True)
    screen.launch("case-a", 10)
    screen.launch("case-b", 20)
    for launch in (1, 2):  # the id is long, but the figures still fit
        screen.progress.begin("fsdp-shard_grad_op-llama-3.1-8b-s4096-b1-bf16-mixed-1x8", 20, launch)
    screen.steps((0, 0), (0, 3), (1, 4))
    left = "; about 30 s for 2 more cases"
    name = "[3/5] fsdp-shard_grad_op-llama-3.1-… launch 2"
    starting, _, last = screen.lives[-3:]
    assert starting == f"{name} starting for 0 s{left}"
    assert last == f"{name} step 4 of 20, 256 tokens/s, 16 s left{left}"


def test_long_times_are_minutes_and_last_has_none() -> None:
    screen = Screen(3, terminal=False)
    for case, seconds in (("case-a", 300), ("case-b", 60), ("case-c", 60)):
        screen.launch(case, seconds)
    assert [line.split(" passed in ")[1] for line in screen.lines if " passed in " in line] == [
        "300.0 s; about 10 min for 2 more cases",
        "60.0 s; about 3 min for 1 more case",
        "60.0 s",
    ]


def test_log_says_twice_a_minute_what_it_awaits() -> None:
    screen = Screen(1, terminal=False)
    screen.progress.say("waiting until others are quiet")
    for left in range(120, 0, -1):
        screen.progress.waiting(f"{left} s at the most")
        screen.now += 1
    screen.progress.waiting(None)
    assert screen.lines[1:] == [f"perfsuite: {left} s at the most" for left in (90, 59, 28)]
