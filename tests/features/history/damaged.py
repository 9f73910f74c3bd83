"""Makes histories for `tests.benchmarks.damaged`, which damages their files."""

from pathlib import Path

from perfsuite import documents
from perfsuite.features.history import store
from tests import samples
from tests.benchmarks.damaged.running import in_process
from tests.benchmarks.damaged.world import Target, bad_result


def targets(root: Path) -> list[Target]:
    """Make two histories: one with a failed case, and one in which cases became slower and stayed slower."""
    project = root / "history"
    lost = samples.never_run().replace(case_id="lost", judged_by="b")
    file = samples.write_session(project, bad_result().replace(judged_by="a"), lost)
    store.add(project / "history", file)
    file.unlink()
    (session,) = project.glob("history/cpu*/*/*.json")
    (case,) = project.glob("history/cases/*.json")
    commands = [
        ("history", *words, "--history", "history")
        for words in (("list",), ("failures",), ("list", "--json"), ("failures", "--json"))
    ]
    drifting = root / "drift"
    for night in range(24):
        step_s = (0.1 if night < 12 else 0.13) * (1 + 0.002 * (night * 7 % 5 - 2))
        figures = samples.make_figures(tokens_per_s=51.2 / step_s, step_s_p50=step_s, step_s_mean=step_s)
        began = f"2026-01-{night + 1:02}T03:04:05+00:00"
        run = samples.make_run(figures=figures, started_at=began)
        result = samples.make_result(run, before=None)
        fields = {"started_at": began, "commit": f"{night:02}" * 20}
        store.add(drifting / "history", samples.write_session(drifting, result, **fields))
    (drifting / "results.json").unlink()
    newest = sorted(drifting.glob("history/cpu*/*/*.json"))[-1]
    (drifting_case,) = drifting.glob("history/cases/*.json")
    before = samples.make_launches(*(0.394,) * 5)
    accepted = samples.make_baseline(*before).replace(recorded_at="2026-01-02T03:04:05+00:00")
    baseline = drifting / "baselines" / "cpu-test-2c" / f"{accepted.case.id}.json"
    documents.write(baseline, accepted)
    trends = [("history", "trend", "--history", "history", *words) for words in ((), ("--json",))]
    said = in_process(drifting, trends[1])
    assert said.status == 1, said.output

    def below(of: Path, path: Path) -> str:
        return str(path.relative_to(of))

    added = root / "added"
    samples.write_session(added / "results", bad_result())
    add = ("history", "add", "--history", "new", "results/results.json")
    return [
        Target("added", "results/results.json", "sealed", [add]),
        Target("history", below(project, session), "sealed", commands),
        Target("history", below(project, case), "sealed", commands[:2]),
        Target("drift", below(drifting, newest), "sealed", trends),
        Target("drift", below(drifting, drifting_case), "sealed", trends),
        Target("drift", below(drifting, baseline), "accepting", trends),
    ]
