from pathlib import Path
from typing import Any

from tests.cli.commands import flat, rows
from tests.samples import IMAGES, make_baseline, make_figures, make_machine, make_run
from tests.session.review.launches import CASE, MACHINE, REVIEWED, accept, told
from tests.synthetic import commit
from tests.twin_counts import counts, launch


def test_list_has_reviewed_and_local_baselines(repository: Path) -> None:
    assert "no baselines in baselines" in told("list")
    accept("1", 5, "--reason", "first")
    other = make_machine(hardware_class="cpu-other-4c")
    REVIEWED.write_local(make_baseline(make_run(machine=other)))
    listed = flat(told("list"))
    assert "by Ada" in listed
    assert "local" in listed
    first, second = sorted(rows(told("list", "--json")), key=lambda row: str(row["accepted_by"]))
    assert (first["accepted_by"], second["accepted_by"]) == ("Ada", None)
    assert (first["tokens_per_s"], first["launches"]) == (50_150, 5)


def test_show_has_what_was_accepted(repository: Path) -> None:
    accept("1", 5, "--reason", "first")
    shown = told("show", CASE.id)
    assert "accepted by Ada" in shown
    assert "reason: first" in shown
    assert "tokens/s: 50,050, 50,100, 50,150, 50,200, 50,250 +- 0.2%" in shown
    assert "0.2% between launches; between sessions: unknown: accept baselines of two sessions" in flat(shown)
    (held,) = rows(told("show", CASE.id, "--json"))
    assert held["baseline"]["accepted"]["by"] == "Ada"
    (listed,) = rows(told("list", "--json"))
    assert Path(held["file"]).parent.name == listed["hardware_class"]


def test_show_names_a_pattern_that_matches_nothing(repository: Path) -> None:
    accept("1", 5, "--reason", "first")
    assert "no baseline matches 'nothing'" in told("show", "nothing", status=2)


def test_baselines_of_a_case_that_counts_samples(repository: Path) -> None:
    REVIEWED.write_local(make_baseline(make_run(case=IMAGES, machine=MACHINE)))
    assert "1,000 samples/s" in flat(told("list"))
    shown = told("show", IMAGES.id)
    assert "samples/s: 1,000" in shown
    assert "samples/s with stalls: 990" in shown
    assert "samples/s: new -> 50,150" in accept("1", 5, case=IMAGES)


def test_diff_gives_git_no_option_for_a_ref(repository: Path, tmp_path: Path) -> None:
    written = tmp_path / "written"
    assert "is an option: name a commit" in told("diff", "--", f"--output={written}", status=2)
    assert not written.exists()


def test_diff_against_a_git_ref(repository: Path) -> None:
    accept("1", 5)
    commit(repository)
    assert "no baseline changed since HEAD" in told("diff")
    assert "tokens/s: new" in told("diff", "HEAD~1")
    accept("2", 5, tokens_per_s=60_000)
    changed = told("diff")
    assert "tokens/s: 50,150 +- 0.2% -> 60,180" in changed
    assert "(+20.0%)" in changed
    (row,) = rows(told("diff", "--json"))
    assert len(row["before"]["launches"]) == len(row["now"]["launches"]) == 5
    Path(row["file"]).unlink()
    assert rows(told("diff", "--json")) == [{"file": row["file"], "before": row["before"], "now": None}]
    assert "-> removed" in told("diff")
    assert "no-such-ref" in told("diff", "no-such-ref", status=2)


def test_diff_needs_a_directory_of_baselines(repository: Path) -> None:
    said = told("diff", "--baselines", "typo", status=2)
    assert "--baselines typo: there is no such directory, and there was none at HEAD" in said


def test_list_says_that_a_directory_is_missing(repository: Path) -> None:
    assert "there is no directory typo" in told("list", "--baselines", "typo")
    assert "there is no directory" not in told("list")


def test_diff_lists_what_the_launches_computed(repository: Path) -> None:
    figures = make_figures(unclipped_norm=7.0)
    seen: dict[str, Any] = {"counts": launch(counts()).counts, "dtypes": {"parameters": {"float32": 1000}}}
    accept("1", 5, figures=figures, **seen)
    commit(repository)
    for file in Path("baselines").rglob("*.json"):
        changed = file.read_text().replace('"unclipped_norm": 7.0', '"unclipped_norm": 3.5')
        file.write_text(changed.replace("1000", "500"))
    said = told("diff")
    assert said.count("the norm of the gradients before clipping in step 4: 7 -> 3.5 (-50.0%)") == 2
    assert said.count("dtypes.parameters.float32: 1000 -> 500") == 2
