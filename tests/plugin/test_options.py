import os
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from perfsuite.launch.base import Launcher
from perfsuite.plugin.collection import SESSION
from perfsuite.plugin.options import root_of, values
from perfsuite.session.option_table import options_of
from perfsuite.session.setup import Options
from tests.packages import PODS, Packages
from tests.suite import run, run_cpu


def options(config: pytest.Config) -> Options:
    return options_of(root_of(config), values(config))


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ((), "preflight", True),
        (("--perf-no-preflight",), "preflight", False),
        (("--perf-min-judged=90%",), "min_judged", 0.9),
        (("--perf-explain",), "explain", True),
        (("-o", "perf_explain=true"), "explain", True),
        (("--perf-dry", "--perf-interconnect=8xib400"), "interconnect", "8xib400"),
        (("-o", "perf_interconnect=8xib400"), "interconnect", "8xib400"),
    ],
)
def test_what_is_given_reaches_the_session(
    pytester: pytest.Pytester, given: tuple[str, ...], field: str, value: Any
) -> None:
    assert getattr(options(pytester.parseconfigure(*given)), field) == value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--perf-min-judged=1.1", "*=1.1: give a share from 0% to 100%, or from 0 to 1"),
        *((f"--perf-{name}=--", f"--perf-{name}=--: give a value*") for name in ("against", "json")),
        *(
            (f"--perf-{name}=", f"--perf-{name}= has no value: give one*")
            for name in ("against", "reference")
        ),
        ("--perf-min-launches=" + 5000 * "9", "--perf-min-launches=9999*: give a whole number from 1 *"),
        ("--perf-inject=slowdwn=3%", "--perf-inject 'slowdwn=3%': give slowdown=P%*mean 'slowdown'[?]"),
        ("--perf-against=nosuch", "--perf-against 'nosuch': 'nosuch' is not a commit of *"),
        (
            "--perf-dry --perf-resume",
            "--perf-dry excludes --perf-resume (dry runs cannot be resumed): leave one *",
        ),
        ("--perf-interconnect=8xib400", "--perf-interconnect needs --perf-dry: add it, or leave *"),
        (
            "--perf-dry --perf-interconnect=fast",
            "--perf-interconnect=fast: give the ports of a machine and their Gbit/s, such as 8xib400 or *",
        ),
    ],
    ids=lambda value: value[:24],
)
def test_an_odd_value_is_a_usage_error(pytester: pytest.Pytester, given: str, said: str) -> None:
    with pytest.raises(pytest.UsageError) as caught:
        pytester.parseconfigure(*given.split())
    assert fnmatch(str(caught.value), said)


@pytest.mark.parametrize("name", ["against", "reference", "baselines"])
def test_refuses_to_choose_between_two_values(pytester: pytest.Pytester, name: str) -> None:
    with pytest.raises(pytest.UsageError) as caught:
        pytester.parseconfigure(f"--perf-{name}", "A=1", f"--perf-{name}=A=2")
    assert f"--perf-{name} is given 2 times on the command line, but takes one value" in str(caught.value)


def test_command_line_overrides_addopts(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "--perf-baselines=one")
    assert options(pytester.parseconfigure("--perf-baselines=two")).baselines.name == "two"


def test_leaves_a_too_long_path_to_pytest(pytester: pytest.Pytester) -> None:
    pytester.parseconfigure("a" * 5000)


def test_help_shows_all_but_the_commands_option(suite: pytest.Pytester) -> None:
    shown = str(run(suite, "--help").stdout)
    assert "--perf-strict=OUTCOMES" in shown
    assert "--perf-cases" not in shown
    assert "SUPPRESS" not in shown


def launcher_of(config: pytest.Config) -> Launcher:
    return config.stash[SESSION].setup.host.launcher


@pytest.mark.parametrize(
    ("given", "values"),
    [
        ((), ("any", False)),
        (("--perf-k8s-pool=gpu", "--perf-k8s-spot"), ("gpu", True)),
        (("-o", "perf_k8s_pool=gpu", "-o", "perf_k8s_spot=true"), ("gpu", True)),
        (("-o", "perf_k8s_pool=gpu", "--perf-k8s-pool=cpu"), ("cpu", False)),
    ],
)
def test_other_packages_launcher_gets_its_settings(
    pytester: pytest.Pytester, packages: Packages, given: tuple[str, ...], values: tuple[str, bool]
) -> None:
    packages.install("perfsuite-k8s", PODS, launchers="k8s = perfsuite_k8s:Pods")
    config = pytester.parseconfigure("--perf-launcher=k8s", *given)
    assert vars(launcher_of(config))["given"] == values


def test_help_shows_the_settings_of_launchers(suite: pytest.Pytester, packages: Packages) -> None:
    packages.install("perfsuite-k8s", PODS, launchers="k8s = perfsuite_k8s:Pods")
    shown = " ".join(str(run(suite, "--help").stdout).split())
    assert "--perf-k8s-pool=NAME the pool of its pods (default: any)" in shown
    assert "perf_k8s_spot (bool): as --perf-k8s-spot" in shown


def test_names_a_broken_launcher_and_goes_on(
    suite: pytest.Pytester, packages: Packages, simulated: None
) -> None:
    packages.install("perf-broken", "1 / 0", launchers="k8s = perf_broken:Pods")
    (suite.path / "pytest.ini").write_text("[pytest]\nperf_k8s_pool = gpu\n")
    result = run_cpu(suite, "--perf-record-launches=1")
    result.stdout.fnmatch_lines(["perfsuite: k8s = 'perf_broken:Pods' of perf-broken 1.5 * cannot be *"])


def test_broken_launcher_hides_no_other_typo(suite: pytest.Pytester, packages: Packages) -> None:
    packages.install("perf-broken", "1 / 0", launchers="k8s = perf_broken:Pods")
    (suite.path / "pytest.ini").write_text("[pytest]\nperf_k9s_pool = gpu\n")
    result = run(suite, "--collect-only", status=pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines(["ERROR: *pytest.ini: perfsuite has no setting perf_k9s_pool.*"])


@pytest.mark.parametrize("setup", [None, "pyproject.toml"])
def test_no_value_moves_the_root(pytester: pytest.Pytester, tmp_path: Path, setup: str | None) -> None:
    """If a value is an existing path, pytest takes it for a test, and its directory for the root."""
    if setup is not None:
        (pytester.path / setup).write_text("[project]\nname = 'mine'\n")
    here = pytester.path if setup is None else pytester.mkdir("below")
    os.chdir(here)
    out = tmp_path / "out" / "results.json"
    configs = [pytester.parseconfigure("--perf-json", str(out))]
    out.parent.mkdir()
    out.touch()
    configs.append(pytester.parseconfigure("--perf-json", str(out)))
    assert [options(config).baselines for config in configs] == [pytester.path / "baselines"] * 2
    chosen = pytester.parseconfigure(f"--rootdir={tmp_path}")
    assert options(chosen).store == tmp_path / ".perfsuite"


def test_reports_settings_an_option_hides(suite: pytest.Pytester, tmp_path: Path) -> None:
    suite.makeini("[pytest]\nperf_missing_baseline = fail\n")
    (tmp_path / "out").mkdir()
    moved = ("--collect-only", "--perf-report", str(tmp_path / "out"))
    hidden = run(suite, *moved, status=pytest.ExitCode.USAGE_ERROR)
    hidden.stderr.fnmatch_lines(
        [f"ERROR: pytest's settings in {suite.path} were not read. *: write --option=PATH, or *"]
    )
    given = ("--collect-only", f"--perf-report={tmp_path / 'out'}")
    run(suite, *given)
    run(suite, "--collect-only", "-c", "tox.ini", *given[1:])
    elsewhere = (suite.path / "test_cases.py").rename(tmp_path / "test_cases.py")
    run(suite, "--collect-only", elsewhere)


def test_reports_baselines_that_are_not_the_roots(suite: pytest.Pytester, tmp_path: Path) -> None:
    suite.mkdir("baselines")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "out").mkdir()
    moved = ("--collect-only", "--perf-report", str(tmp_path / "out"))
    result = run(suite, *moved, status=pytest.ExitCode.USAGE_ERROR)
    there = f"{suite.path}/baselines exists, but baselines would be read from {tmp_path}/baselines"
    result.stderr.fnmatch_lines([f"ERROR: {there}.*"])
    run(suite, *moved, "--perf-baselines=elsewhere")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            "[pytest]\nperf_strixt = all\n",
            "perfsuite has no setting perf_strixt. Did you mean 'perf_strict'?",
        ),
        (
            "[pytest]\nperfstrict = all\n",
            "perfsuite has no setting perfstrict. Did you mean 'perf_strict'?",
        ),
        ("[pytest]\nperf_nothing_of_ours = 1\n", "perfsuite has no setting perf_nothing_of_ours. Correct"),
        (
            "[pytesd]\nperf_missing_baseline = fail\n",
            "perf_missing_baseline is outside pytest's section, in [pytesd], so it is ignored",
        ),
        ("[pytest]\n[tool:pytest]\nperf_strict = all\n", "perf_strict is outside pytest's section"),
    ],
)
def test_a_setting_that_nobody_reads_is_refused(suite: pytest.Pytester, content: str, said: str) -> None:
    """pytest would only warn, and a gate that should be strict would pass."""
    suite.makefile(".ini", pytest=content)
    result = suite.runpytest("-m", "cpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert said in result.stderr.str()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tox.ini", "[pytesd]\nperf_missing_baseline = fail\n"),
        ("tox.ini", "[pytest ]\nperf_missing_baseline = fail\n"),
        ("tox.ini", "[pytesd]\nperf_missing_baselin = fail\n"),
        ("tox.ini", "[tool:pytest]\nperf_missing_baseline = fail\n"),
        ("setup.cfg", "[tool:pytesu]\nperf_missing_baseline = fail\n"),
        ("pytest.ini", "[Pytest]\npref_strict = all\n"),
        ("pytest.ini", "[pytesd]\nperf_stric = all\n[pytest]\nperf_shadow = false\n"),
        ("pyproject.toml", "[tool.pytest.ini_option]\nperf_strict = 'all'\n"),
        ("pyproject.toml", "[tool.pytset.ini_options]\nperf_strict = 'all'\n"),
        ("pytest.toml", "[tool.pytest]\nperf_strict = 'all'\n"),
    ],
)
def test_a_misspelled_section_is_refused(suite: pytest.Pytester, name: str, content: str) -> None:
    (suite.path / name).write_text(content)
    result = run(suite, "--collect-only", status=pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines([f"ERROR: *{name}: p* is outside pytest's section, in [[]*"])


@pytest.mark.parametrize(
    "content",
    ["[pytesd]\nperf_strict = all\n", "[pytest]\nperf_strixt = all\n", "[pytest]\npref_strict=all\n"],
)
def test_a_file_of_any_name_is_checked(suite: pytest.Pytester, content: str) -> None:
    suite.makefile(".ini", ci=content)
    result = run(suite, "--collect-only", "-c", "ci.ini", status=pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines(["ERROR: *ci.ini: *"])


def test_a_misspelled_override_is_refused(suite: pytest.Pytester) -> None:
    given = ("--collect-only", "-o", "perf_missing_baselin=fail")
    result = run(suite, *given, status=pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines(
        ["ERROR: -o perf_missing_baselin=fail: * Did you mean 'perf_missing_baseline'*"]
    )


def test_a_dangling_file_of_settings_is_refused(suite: pytest.Pytester) -> None:
    (suite.path / "pytest.ini").symlink_to("nosuch.ini")
    result = run(suite, "--collect-only", status=pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines(["ERROR: *pytest.ini is a link to nosuch.ini, which does not exist*"])


def test_an_indented_setting_is_refused(suite: pytest.Pytester) -> None:
    (suite.path / "pytest.ini").write_text("[pytest]\naddopts = -q\n  perf_strict = all\n")
    result = run(suite, "--collect-only", status=pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines(["ERROR: *pytest.ini: perf_strict is part of the value above it, *"])


def test_a_file_beside_the_tests_is_checked(suite: pytest.Pytester) -> None:
    suite.mkdir("below")
    (suite.path / "test_cases.py").rename(suite.path / "below" / "test_cases.py")
    (suite.path / "below" / "tox.ini").write_text("[pytesd]\nperf_strict = all\n")
    run(suite, "--collect-only", "below", status=pytest.ExitCode.USAGE_ERROR)


def test_settings_behind_another_file_are_refused(suite: pytest.Pytester) -> None:
    (suite.path / "tox.ini").write_text("[pytest]\nperf_strict = all\n")
    (suite.path / "pytest.ini").touch()
    result = run(suite, "--collect-only", status=pytest.ExitCode.USAGE_ERROR)
    result.stderr.fnmatch_lines(["ERROR: *tox.ini: perf_strict is not read, because * from *pytest.ini: *"])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pytest.ini", "[pytest]\nstore = 1\nbaselines = 1\nlauncher = 1\nshadow = 1\nmax_launches = 1\n"),
        (
            "pyproject.toml",
            "[tool.mytool]\nperf_store = 'x'\n[tool.pytest.ini_options]\nperf_shadow = 'no'\n",
        ),
        ("tox.ini", "[testenv]\nperf_store = x\n[gh-actions]\nperformance = 1\n"),
        ("pyproject.toml", "[tool.pytest_env]\nPERFSUITE_LOCK = '/tmp/lock'\n"),
        ("pytest.ini", "[pytest]\nmarkers =\n    perf_tests: of speed\n"),
        ("setup.cfg", "[metadata]\nname = perfect\n[tool:isort]\nperf_strict = 1\n"),
    ],
)
def test_keys_of_other_tools_are_left_alone(suite: pytest.Pytester, name: str, content: str) -> None:
    (suite.path / name).write_text(content)
    run(suite, "--collect-only", "-q")


def test_leaves_foreign_settings_to_pytest(suite: pytest.Pytester) -> None:
    names = ("somebody_elses", "store", "baselines", "launcher", "shadow", "max_launches", "perfetto_out")
    suite.makefile(".ini", pytest="[pytest]\n" + "".join(f"{name} = 1\n" for name in names))
    assert suite.runpytest("--collect-only", "-q").ret == pytest.ExitCode.OK


TOOL = '[tool.mytool]\nperf_store = "x"\n'


@pytest.mark.parametrize(
    ("content", "is_refused"),
    [
        (TOOL, False),
        (f"[tool.pytest.ini_options]\n{TOOL}", False),
        (f"[tool.other]\ntext = '''\n[pytest]\nperf_store = 1\n'''\n{TOOL}", False),
        ('[tool.pytest.ini_options]\n[pytest]\nperf_store = "x"\n', True),
        ('perf_store = "x"\n[tool.pytest.ini_options]\n', True),
        ('[tool.pytest.ini_options]\n[tool.pytest.ini_option]\nperf_store = "x"\n', True),
    ],
)
def test_names_a_setting_outside_pytests_table(
    suite: pytest.Pytester, content: str, is_refused: bool
) -> None:
    (suite.path / "pyproject.toml").write_text(content)
    result = suite.runpytest("--collect-only", "-q", "-c", "pyproject.toml")
    assert ("perf_store is outside pytest's section" in result.stderr.str()) == is_refused
