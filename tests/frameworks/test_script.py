import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import perfsuite
from perfsuite import Case, LoRA, Model, Script, Topology, documents
from perfsuite.errors import CaseError
from perfsuite.frameworks.base import Command, framework_of
from perfsuite.launch import driving
from perfsuite.launch.job import Job
from perfsuite.launch.requirements import unsupported
from perfsuite.measure import Launching, launch_once
from perfsuite.node.machine import detect
from perfsuite.results.rank_report import RankReport
from perfsuite.results.run import Run
from perfsuite.results.run_dir import RunDir
from perfsuite.verdict.arms import judge_counts
from perfsuite.worker.counting.growth import DISABLED, FROZEN
from tests.frameworks import test_base as base
from tests.frameworks.test_base import observed
from tests.samples import known, make_case, make_machine

STARTUP = Path(perfsuite.__file__).parent / "worker" / "startup"
ONE = Topology(processes_per_node=1)
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node=2")

TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.layer(x)

def main():
    assert __name__ == "__main__" and sys.modules["__main__"].Net is Net
    assert sys.path[0] == os.path.dirname(os.path.abspath(__file__)), sys.path
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(64, 16))
    sampler = torch.utils.data.DistributedSampler(data)
    try:
        for epoch in range(100):
            for (x,) in torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler):
                if "--die" in sys.argv:
                    raise ValueError("bad batch")
                loss = (model(x) - x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            print("epoch", epoch, "loss", loss.item())
        torch.save(model.state_dict(), "model.pt")
    finally:
        print("cleaned up")
        dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
ALONE = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1000):
    optimizer.zero_grad()
    (model(torch.ones(4, 8)) - 1).square().mean().backward()
    optimizer.step()
"""


def case_of(framework: Script, **changes: Any) -> Case:
    net = {"model": Model.named("net"), "framework": framework, "sequence_length": 16, "micro_batch": 4}
    return base.SMALL.replace(**{**net, **changes})


def script(directory: Path, text: str, name: str = "train.py") -> str:
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def measured(case: Case, directory: Path, inject: str | None = None) -> Run:
    return base.measured(case, directory / "run", inject)


def failure_of(case: Case, directory: Path) -> tuple[str, str]:
    failure = known(launch_once(case, detect(), directory / "run").failure)
    return failure.kind, f"{failure.message}\n{failure.traceback}"


# --- as data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"env": {"A": "c", "HF_TOKEN": "hidden"}}, "env: 'HF_TOKEN'"),
        ({"env": {"aws_secret_access_key": "hidden"}}, "env: 'aws_secret_access_key'"),
        ({"env": {"PAD_TOKEN": "<pad>", "WANDB_APIKEY": "hidden"}}, "env: 'WANDB_APIKEY'"),
        ({"env": {"AWS_ACCESS_KEY_ID": "hidden"}}, "env: 'AWS_ACCESS_KEY_ID'"),
        ({"env": {"DB": "postgres://me:hidden@host/db"}}, "env: 'DB'"),
        ({"arguments": ("--wandb-key", "hidden")}, "arguments: '--wandb-key'"),
        ({"arguments": ("trainer.hub_token=hidden",)}, "arguments: 'trainer.hub_token'"),
        ({"path": None, "command": ("a", "--password=hidden")}, "arguments: '--password'"),
        ({"arguments": ("--db=postgres://me:hidden@host/db",)}, "arguments: '--db=postgres'"),
    ],
)
def test_refuses_secrets_without_repeating_them(options: dict[str, Any], name: str) -> None:
    with pytest.raises(
        CaseError, match=f"^Script: {name} looks like .* in the environment of pytest"
    ) as raised:
        Script(**{"path": "a.py", **options})
    assert "hidden" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": {"A=hidden": "1"}}, "env: the name that begins with 'A' contains '=' or NUL. Give"),
        ({"env": {"": "1"}}, "env: a name is empty. Give name and value separately"),
        ({"env": {"A\0hidden": "1"}}, "env: the name that begins with 'A' contains '=' or NUL. Give"),
        ({"env": {"A": "hidden\0"}}, r"env: NUL \(.0\) cannot be passed to a process: remove it"),
        ({"arguments": ("x", "hidden\0")}, "arguments: NUL"),
        ({"path": "hidden\0.py"}, "path: NUL"),
        ({"cwd": "hidden\0"}, "cwd: NUL"),
        ({"path": None, "module": "hidden\0"}, "module: NUL"),
        ({"path": None, "command": ("python", "hidden\0")}, "command: NUL"),
    ],
)
def test_refuses_nul_without_repeating_the_text(options: dict[str, Any], said: str) -> None:
    with pytest.raises(CaseError, match=f"^Script: {said}") as raised:
        Script(**{"path": "a.py", **options})
    assert "hidden" not in str(raised.value)


def test_a_path_may_be_relative_to_cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    inside = Path(script(tmp_path / "work", "x = 1\n"))
    case = case_of(Script(path="train.py", cwd="work"))
    framework = framework_of(case)
    framework.check(case)
    assert framework.plan(case).command.words[-1] == str(inside)  # type: ignore[union-attr]
    case = case_of(Script(path="work/train.py", cwd="work"))
    from_here = framework_of(case)
    from_here.check(case)
    assert from_here.plan(case).command.words[-1] == str(inside)  # type: ignore[union-attr]


def test_a_path_that_names_two_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "x = 1\n")
    script(tmp_path / "work", "x = 2\n")
    case = case_of(Script(path="train.py", cwd="work"))
    framework = framework_of(case)
    with pytest.raises(CaseError, match=r"^path='train.py' is a file in .* different file in cwd='work'"):
        framework.check(case)
    (tmp_path / "work" / "train.py").unlink()
    (tmp_path / "work" / "train.py").symlink_to(tmp_path / "train.py")
    framework.check(case)


def test_accepts_words_that_only_resemble_secrets() -> None:
    env = {"TOKENIZERS_PARALLELISM": "false", "MAX_TOKENS": "8", "HF_TOKEN": "", "HUB": "https://host/x"}
    env |= dict.fromkeys(("PAD_TOKEN", "EOS_TOKEN", "MAX_TOKEN_LENGTH", "TEXT_KEY", "MONKEY", "HOTKEY"), "x")
    arguments = ("--pad-token", "<pad>", "--text-key=text", "--max-tokens", "8", "--push", "--hub-token")
    assert dict(Script(path="a.py", env=env, arguments=arguments).env) == env


def test_id_identifies_the_target_not_a_path() -> None:
    here = str(Path.cwd())
    scripts = [
        Script(path="examples/train.py"),
        Script(path="other/train.py"),
        Script(path="/elsewhere/train.py"),
        Script(path="examples/train.py", arguments=("--lr", "1")),
        Script(path="examples/train.py", cwd="examples"),
        Script(path="examples/train.py", env={"A": "1"}),
        Script(path="examples/train.py", loss=None),
        Script(path="examples/train.py", clock="AdamW"),
        Script(command=("torchrun", "train.py")),
        Script(module="pkg.train"),
    ]
    *ids, module = (framework.slug() for framework in scripts)
    assert len({*ids, module}) == 10
    assert all(slug.startswith("script-train-") for slug in ids)
    assert module.startswith("script-pkg.train-")
    assert "no_loss" in ids[6]
    assert all(Script(path=f"{here}/examples/train.py", cwd=cwd).slug() == ids[0] for cwd in (".", here))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"command": ("torchrun", "--nproc-per-node=2", "train.py")}, "train"),
        ({"command": ("python", "tools/fit.py", "config/small.py")}, "fit"),
        ({"command": ("./fit.py",)}, "fit"),
        ({"command": ("python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "fit.py")}, "fit"),
        ({"command": ("python", "-m", "torch.distributed.run", "-m", "pkg.fit")}, "pkg.fit"),
        ({"command": ("/opt/bin/llamafactory-cli", "train", "small.yaml")}, "llamafactory-cli-train"),
        ({"command": ("trl", "--verbose", "sft", "--config", "x.yaml")}, "trl-sft"),
        ({"command": ("python", "-c", "import this; this()")}, "python"),
        ({"command": ("fit",)}, "fit"),
        ({"command": ("torchrun", "main.py"), "label": "nano"}, "nano"),
    ],
)
def test_a_slug_says_what_is_run(options: dict[str, Any], named: str) -> None:
    assert re.fullmatch(rf"script-{named}-[0-9a-f]{{6}}", Script(**options).slug())


def test_paths_may_be_given_as_such() -> None:
    as_path = Script(path=Path("a.py"), arguments=("--data", Path("d")), cwd=Path("work"))
    assert as_path == Script(path="a.py", arguments=("--data", "d"), cwd="work")
    assert Script(command=(Path("./run"), "x")) == Script(command=("run", "x"))


def test_a_case_with_variables_reads_back() -> None:
    case = case_of(Script(path="a.py", env={"NCCL_DEBUG": "WARN"}))
    assert Case.model_validate_json(case.model_dump_json()) == case
    job = Job(run_dir=RunDir(Path("d")), case=case, machine=make_machine())
    assert driving.environment(job)["NCCL_DEBUG"] == "WARN"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "gone.py"}, "path='gone.py': No such file or directory in /.*relative to cwd"),
        ({"path": "folder"}, "path='folder': Is a directory"),
        ({"path": "train.sh"}, r"path='train.sh' is not Python \(.*Use command"),
        ({"path": "data.bin"}, "path='data.bin' is not Python"),
        ({"path": "good.py", "cwd": "nowhere"}, "cwd='nowhere': no such directory"),
        ({"module": "no_such.train"}, "module='no_such.train': no_such is neither in . nor installed"),
        ({"command": ("no-such-cli", "train")}, "'no-such-cli' is neither on PATH nor next to .*python"),
        ({"command": ("./good.py",)}, "'./good.py' is neither on PATH nor next to"),
    ],
)
def test_missing_file_prevents_a_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "x = 1\n", "good.py")
    script(tmp_path, "#!/bin/sh\nif true; then echo; fi\n", "train.sh")
    (tmp_path / "data.bin").write_bytes(b"\x00\xff")
    (tmp_path / "folder").mkdir()
    with pytest.raises(CaseError, match=said):
        launch_once(case_of(Script(**options)), make_machine(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "good.py", "arguments": ("--lr", "1")}, ("PYTHON", "-u", "GOOD", "--lr", "1")),
        ({"path": "GOOD"}, ("PYTHON", "-u", "GOOD")),
        ({"module": "good"}, ("PYTHON", "-u", "-m", "good")),
        ({"module": "torch.distributed.run"}, ("PYTHON", "-u", "-m", "torch.distributed.run")),
        ({"command": ("./good.py",)}, ("GOOD",)),
        ({"command": ("torchrun", "good.py")}, ("TORCHRUN", "good.py")),
    ],
    ids=["path", "absolute path", "module", "module of a package", "command", "program beside python"],
)
def test_finds_an_existing_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    """`GOOD`, `PYTHON` and `TORCHRUN` stand for paths."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    good = Path(script(tmp_path, "x = 1\n", "good.py"))
    good.chmod(0o755)
    torchrun = str(Path(sys.executable).parent / "torchrun")
    paths = {"GOOD": str(good), "PYTHON": sys.executable, "TORCHRUN": torchrun}
    given = {name: paths.get(value, value) if name == "path" else value for name, value in options.items()}
    framework: Any = Script(**given, cwd=str(tmp_path))
    framework.check(make_case())
    expected = tuple(paths.get(word, word) for word in words)
    asked = Command(words=expected, directory=str(tmp_path), starts_ranks="command" in options)
    assert framework.plan(make_case()).command == asked


def test_checks_a_promised_configuration() -> None:
    case = case_of(Script(path="a.py"), model="llama-tiny", attention="eager")
    assert unsupported(case, make_machine()) is None
    assert "attention" not in framework_of(case).expected(case)
    alone = case_of(Script(path="a.py"), topology=ONE)
    expected = framework_of(alone).expected(alone)
    assert (expected["attention"], expected["world_size"]) == (None, None)


# --- how a process starts that a launch command creates ---------------------------------------------------


def started(directory: Path, code: str, *, in_launch: bool = True) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(STARTUP), str(directory), str(STARTUP.parent.parent)])
    environment = {**os.environ, "PYTHONPATH": paths}
    if in_launch:
        environment["PERFSUITE_RUN_DIR"] = str(directory)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.launch
def test_process_without_torch_pays_nothing(tmp_path: Path) -> None:
    script(tmp_path, "print('the shadowed one')\n", "sitecustomize.py")
    code = "import sys; print([name for name in sys.modules if name.startswith('perfsuite')])"
    done = started(tmp_path, code)
    assert done.stdout.splitlines() == ["the shadowed one", "[]"]
    assert done.stderr == ""


@pytest.mark.launch
def test_torch_import_reports_missing_perfsuite(tmp_path: Path) -> None:
    script(tmp_path, "", "torch/__init__.py")
    code = "import sys; sys.modules['perfsuite'] = None; import torch"
    done = started(tmp_path, code)
    assert "perfsuite measures this command, but" in done.stderr
    assert started(tmp_path, code, in_launch=False).returncode == 0, "outside a launch nothing is hooked"


ASKS = {
    "find_spec": "importlib.util.find_spec('torch'); import torch",
    "twice": "importlib.util.find_spec('torch'); importlib.util.find_spec('torch'); import torch",
    "metadata": "importlib.metadata.packages_distributions(); import torch",
    "lazily": (
        "spec = importlib.util.find_spec('torch'); loader = importlib.util.LazyLoader(spec.loader); "
        "spec.loader = loader; module = importlib.util.module_from_spec(spec); "
        "sys.modules['torch'] = module; loader.exec_module(module); module.attribute"
    ),
    "thread": (
        "importlib.util.find_spec('torch'); "
        "t = threading.Thread(target=importlib.import_module, args=('torch',)); t.start(); t.join()"
    ),
    "through a finder that asks all": (
        "sys.meta_path.insert(0, type('Asks', (), {'find_spec': asks})()); import torch"
    ),
    "through a finder of long ago": "sys.meta_path.insert(1, object()); import torch",
    "after a failure": (
        "sys.modules['fails'] = None\ntry: import torch\nexcept ImportError: pass\n"
        "del sys.modules['fails']; sys.modules['fails'] = sys; import torch"
    ),
}
ASKER = """
import importlib.metadata, importlib.util, sys, threading, types
asking = []
def asks(self, name, path=None, target=None):
    if name == "torch" and not asking:
        asking.append(name)
        return importlib.util.find_spec(name)
attached = types.ModuleType("perfsuite.worker.script.attach")
attached.attach = lambda: print("attached", sys.modules["torch"].attribute)
sys.modules["perfsuite.worker.script.attach"] = attached
"""


@pytest.mark.launch
@pytest.mark.parametrize("how", ASKS)
def test_attaches_once_whoever_imports_torch(tmp_path: Path, how: str) -> None:
    """Both torch and the measurement are fake, with one line each."""
    needs = "import fails\n" if how == "after a failure" else ""
    script(tmp_path, f"{needs}attribute = 1\n", "torch/__init__.py")
    done = started(tmp_path, ASKER + ASKS[how])
    assert (done.stdout, done.stderr) == ("attached 1\n", "")


@pytest.mark.launch
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("import sitecustomize; sitecustomize._then_attach = fails", "a fault"),
        ("attached.attach = fails", "a fault"),
        ("del attached.attach", "cannot import name 'attach'"),
        ("del sys.modules['perfsuite.worker.script.attach']", "No module named 'torch."),
    ],
    ids=["found", "attached", "imported", "a torch that lacks a module"],
)
def test_our_fault_never_stops_a_script(tmp_path: Path, fault: str, said: str) -> None:
    script(tmp_path, "attribute = 1\n", "torch/__init__.py")
    code = f"{ASKER}\ndef fails(*args): raise KeyError('a fault')\n{fault}\nimport torch; print('trains')"
    done = started(tmp_path, code)
    assert (done.stdout, done.returncode) == ("trains\n", 0)
    failure = known(documents.read(RunDir(tmp_path).rank(0), RankReport).failure)
    assert failure.kind == "error"
    message = "perfsuite could not observe this script because of an error in perfsuite"
    assert failure.message.startswith(message)
    assert said in failure.message


# --- launched ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_path(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("path")
    train = script(directory, TRAIN)
    (directory / "work").mkdir()
    result = measured(case_of(Script(path=train, cwd=str(directory / "work"))), directory)
    log = RunDir(directory / "run").rank_log(0).read_text()
    assert log.count("cleaned up") == 1, "the script's `finally` ran when the launch ended"
    assert not list((directory / "work").iterdir()), "the launch ended before the script could save its model"
    return result


@pytest.mark.smoke("script")
def test_unchanged_script_gives_figures(by_path: Run) -> None:
    figures = by_path.figures
    assert len(by_path.step_s) == len(by_path.loss) == len(by_path.probe_s) == 12
    assert figures.tokens_per_s == pytest.approx(2 * 4 * 16 / float(figures.step_s_p50 or 0))
    assert figures.peak_memory_bytes is not None
    assert by_path.flops is None
    assert by_path.device_probe


@pytest.mark.smoke
def test_unchanged_script_has_its_settings_observed(by_path: Run) -> None:
    settings = observed(by_path).settings
    assert (settings["wrapper"], settings["world_size"]) == ("DistributedDataParallel", "2")
    assert settings["compute_dtype"] == "float32"
    assert observed(by_path).environment["script"].startswith("train.py ")


@pytest.mark.launch
def test_the_start_up_of_a_script_has_all_parts(by_path: Run) -> None:
    parts = ["build", "data", "first step", "imports", "process group"]
    assert sorted(by_path.spans) == ["start-up", *(f"start-up: {part}" for part in parts)]


@pytest.mark.nightly
def test_trains_the_same_under_its_own_launcher(by_path: Run, tmp_path: Path) -> None:
    # Many libraries look for torch first.
    asks_first = "import importlib.util; assert importlib.util.find_spec('torch')"
    train = script(tmp_path, asks_first + TRAIN)
    result = measured(case_of(Script(command=(*TORCHRUN, train))), tmp_path)
    assert result.loss == pytest.approx(by_path.loss)
    assert len(result.step_s) == 12
    assert (tmp_path / "run" / "agent-0.log").read_text().count("cleaned up") == 2


WALKS = """
import torch
def start(): pass
def walk(): pass
for _ in range(1234): walk()
start()
"""


@pytest.mark.nightly
def test_counts_what_a_script_builds(tmp_path: Path) -> None:
    train = script(tmp_path, WALKS + ALONE)
    named = Script(path=train, phases={"start": "train:start"})
    case = case_of(named, topology=ONE, max_warmup_steps=4)
    run = launch_once(case, detect(), tmp_path / "run", Launching(counted_steps=1))
    (counted,) = run.counts
    part = next(name for name in counted.counts.spans if "first step" in name)
    calls = known(counted.counts.spans[part].python)
    assert calls.functions["__main__.walk"] == 1234
    assert len(run.spans["start"].seconds) == 1, "the phase was found before its first call"


OWN_PROCESS = """
import os, sys
first = set(sys.modules)
assert not first & {"torch", "numpy", "perfsuite.worker.script.attach"}, first
assert os.environ["OMP_NUM_THREADS"] == "3"
os.environ["OMP_NUM_THREADS"] = "1"
where = os.environ["PERFSUITE_LAUNCH_DIR"]
assert sys.argv[1:] == ["--out", where + "/out"] and os.environ["OUT"] == where, (sys.argv, os.environ["OUT"])
assert os.listdir(where) == []
with open(os.environ["OUT"] + "/checkpoint", "w") as file:
    print(*(os.environ.get(name) for name in ("RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID")), file=file)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["module", "command"])
def test_script_keeps_its_process_and_directory(tmp_path: Path, how: str) -> None:
    """When the script's first line runs, perfsuite has not imported torch yet.

    The environment variables that the script sets are therefore effective.
    """
    train = script(tmp_path, OWN_PROCESS + ALONE)
    arguments = ("--out", "{launch_dir}/out")
    what: dict[str, Any] = {"command": ("python", train, *arguments)}
    if how == "module":
        what = {"module": "train", "arguments": arguments, "cwd": str(tmp_path)}
    framework = Script(**what, env={"OUT": "{launch_dir}", "OMP_NUM_THREADS": "3"})
    result = measured(case_of(framework, topology=ONE), tmp_path)
    assert observed(result).environment["threads"] == "1"
    words = (tmp_path / "run" / "files" / "checkpoint").read_text().split()
    assert words == ["None"] * 3, "there is no launcher, and no rank"


@pytest.mark.launch
@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        (
            "path",
            "print('no data here'); sys.exit(3)",
            "^the script ended with exit code 3, before an optimizer "
            "step was seen(?s:.*)last lines of rank-0.log:\nno data here",
        ),
        ("command", "", "exit code 0, before an optimizer step was seen: it does not train"),
        (
            "command",
            "sys.exit('no config')",
            "the command ended with exit code 1(?s:.*)last lines of agent-0.log:\nno config",
        ),
    ],
)
def test_reports_a_script_that_never_trains(tmp_path: Path, how: str, code: str, said: str) -> None:
    code = f"import sys; {code}"
    what = {"path": script(tmp_path, code)} if how == "path" else {"command": ("python", "-c", code)}
    kind, message = failure_of(case_of(Script(**what), topology=ONE), tmp_path)
    assert kind == "crash"
    assert re.search(said, message)


@pytest.mark.launch
def test_a_crash_shows_the_scripts_traceback(tmp_path: Path) -> None:
    command = ("torchrun", "--standalone", "--nproc-per-node=1", script(tmp_path, TRAIN), "--die")
    kind, said = failure_of(case_of(Script(command=command), topology=ONE), tmp_path)
    assert kind == "crash"
    assert "elastic" not in said
    assert said.startswith("ValueError: bad batch\nTraceback")
    assert 'train.py", line' in said


@pytest.mark.launch
def test_one_process_needs_no_observed_loss(tmp_path: Path) -> None:
    """The script's first steps are measured, even though its loop catches errors and the script fails later.

    The script replaces the clock with one that is ten times slower. That does not change the measured times.
    """
    text = """
import time, torch
real = time.perf_counter
time.perf_counter = lambda: real() / 10
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(50):
    optimizer.zero_grad(); time.sleep(0.02)
    (model(torch.ones(4, 8)) - 1).square().backward(torch.ones(4, 8))
    try: optimizer.step()
    except BaseException: pass
raise OSError
"""
    result = measured(case_of(Script(path=script(tmp_path, text), loss=None), topology=ONE), tmp_path)
    assert (len(result.step_s), result.loss) == (12, ())
    assert min(result.step_s[1:]) >= 0.02, "each step takes at least as long as the sleep"
    assert any(note.startswith("loss not observed") for note in result.notes)
    assert "processes failed after reporting: rank 0: exit code 1" in result.notes


@pytest.mark.launch
def test_a_child_of_a_script_trains_to_its_end(tmp_path: Path) -> None:
    probe = script(tmp_path, ALONE.replace("1000", "50") + "open('probed', 'w')\n", "probe.py")
    text = f"import subprocess, sys; subprocess.run([sys.executable, {probe!r}], check=True)\n{ALONE}"
    framework = Script(path=script(tmp_path, text), cwd=str(tmp_path))
    result = measured(case_of(framework, topology=ONE), tmp_path)
    assert (tmp_path / "probed").exists()
    assert len(result.step_s) == 12


WRAPPED = "model = DistributedDataParallel(Net())"
SCALED = TRAIN.replace("return self.layer(x)", "return self.layer(x) * self.scale").replace(
    "self.layer = torch.nn.Linear(16, 16)",
    "self.layer = torch.nn.Linear(16, 16); self.scale = torch.nn.Parameter(torch.ones(16))",
)


@pytest.mark.launch
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (ALONE, "world_size: the case asks for '2', but '1, no process group' ran"),
        pytest.param(
            SCALED.replace(WRAPPED, "model = Net(); model.layer = DistributedDataParallel(model.layer)"),
            "the 2 ranks trained apart: 1 of 3 parameters, such as scale, are not the same on all ranks "
            "after the last step. ",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["two copies", "wrapped in part"],
)
def test_refuses_a_job_unlike_its_case(tmp_path: Path, text: str, said: str) -> None:
    kind, message = failure_of(case_of(Script(path=script(tmp_path, text))), tmp_path)
    assert kind == "mismatch"
    assert message.startswith(said)


@pytest.mark.nightly
def test_gradients_may_be_exchanged_by_hand(tmp_path: Path) -> None:
    by_hand = "for p in model.parameters(): dist.all_reduce(p.grad, op=dist.ReduceOp.SUM); p.grad /= 2"
    text = TRAIN.replace(WRAPPED, "model = Net()").replace(
        "optimizer.step()", f"{by_hand}\n                optimizer.step()"
    )
    run = measured(case_of(Script(path=script(tmp_path, text)), sequence_length=None), tmp_path)
    assert observed(run).settings["wrapper"] == "none"
    assert run.figures.tokens_per_s == pytest.approx(2 * 4 / float(run.figures.step_s_p50 or 0))
    assert run.flops is None


@pytest.mark.nightly
def test_script_and_framework_training_agree(tmp_path: Path) -> None:
    """The loop of the script is that of the framework ddp."""
    lora = LoRA(rank=4, alpha=8, targets=("q_proj", "v_proj"))
    ddp = base.SMALL.replace(sequence_length=16, lora=lora, learning_rate=1e-2)
    text = f"""
import torch, torch.distributed as dist
from perfsuite.case.case import Case
from perfsuite.frameworks.common.model import build_model, build_optimizer, synthetic_batches
dist.init_process_group("gloo")
case = Case.model_validate_json({ddp.model_dump_json()!r})
model = torch.nn.parallel.DistributedDataParallel(build_model(case, torch.device("cpu")))
optimizer = build_optimizer(case, model)
while True:
    for tokens in synthetic_batches(case, dist.get_rank(), torch.device("cpu")):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    as_script_case = ddp.replace(framework=Script(path=script(tmp_path, text)), learning_rate=1e-3)
    assert unsupported(as_script_case, detect()) is None
    as_script = measured(as_script_case, tmp_path / "script")
    as_framework = measured(ddp, tmp_path / "ddp")
    assert as_script.loss == pytest.approx(as_framework.loss, rel=1e-6)
    assert as_script.flops == as_framework.flops
    settings = dict(observed(as_framework).settings)
    assert observed(as_script).environment["attention_kernel"] == settings.pop("attention_kernel")
    assert observed(as_script).settings == settings


@pytest.mark.nightly
def test_faults_are_injected_under_any_launcher(tmp_path: Path) -> None:
    """If a rank dies while its process group is open, it reports why.

    Otherwise torchrun could end it first.
    """
    text = TRAIN.replace("dist.destroy_process_group()", "pass")
    case = case_of(Script(command=(*TORCHRUN, script(tmp_path, text))))
    failure = known(measured(case, tmp_path, inject="crash").failure)
    assert (failure.kind, failure.rank) == ("crash", 1)
    assert "injected crash" in failure.message


CLIPS = """
import sys
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(1000):
    optimizer.zero_grad()
    for _ in range(4):
        loss = (model(torch.ones(4, 8)) - 1).square().mean()
        (loss if "--sum" in sys.argv else loss / 4).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
"""
TRAINS_WITH_THE_TRAINER = """
import sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)

class Summed(Trainer):
    def compute_loss(self, *args, **kwargs):
        return (4 if "--sum" in sys.argv else 1) * super().compute_loss(*args, **kwargs)

config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2)
data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (640, 8))]
arguments = TrainingArguments(
    output_dir=sys.argv[1], per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=40,
    max_grad_norm=0.05, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    lr_scheduler_type="constant",
)
Summed(LlamaForCausalLM(config), arguments, train_dataset=data).train()
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    "text",
    [CLIPS, pytest.param(TRAINS_WITH_THE_TRAINER, marks=pytest.mark.nightly)],
    ids=["plain", "trainer"],
)
def test_a_missing_mean_is_found_behind_clipping(tmp_path: Path, text: str) -> None:
    """If the script sums instead of averaging, loss and gradients are four times as large.

    Gradients are then clipped to the same norm. A step does less work.
    """
    path = script(tmp_path, text)
    runs = []
    for name, more in (("mean", ()), ("sum", ("--sum",))):
        framework = Script(path=path, arguments=("{launch_dir}", *more), loss="finite")
        case = case_of(framework, topology=ONE, gradient_accumulation=4, sequence_length=8)
        runs.append(measured(case.replace(max_warmup_steps=4, steps=10), tmp_path / name))
    norms = [known(run.figures.unclipped_norm) for run in runs]
    assert norms[1] / norms[0] == pytest.approx(4, rel=0.01)
    clipped = [known(run.figures.gradient_norm) for run in runs]
    assert clipped[1] == pytest.approx(clipped[0], rel=0.01)
    verdict = judge_counts(*runs)
    assert (verdict.outcome, verdict.failure) == ("failed", "loss")
    assert verdict.reasons[0].startswith("loss and gradients x 4.0")


LEAKS = ALONE.replace(
    "    optimizer.step()", "    kept.append(({'step': [step]}, [step]))\n    optimizer.step()"
)
LEAKS = LEAKS.replace("import torch\n", "import torch\nkept = []\n")
COUNTED_ALONE: dict[str, Any] = {"topology": ONE, "max_warmup_steps": 4}


@pytest.mark.launch
def test_finds_a_leak_and_spares_a_clean_script(tmp_path: Path) -> None:
    runs = []
    for name, text in (("a", ALONE), ("again", ALONE), ("b", LEAKS)):
        (tmp_path / name).mkdir()
        case = case_of(Script(path=script(tmp_path / name, text)), **COUNTED_ALONE)
        runs.append(known_run(launch_once(case, detect(), tmp_path / name / "run")))
    clean, again, leaking = runs
    assert judge_counts(clean, again).outcome == "passed"
    verdict = judge_counts(clean, leaking)
    assert verdict.outcome == "regressed"
    sentences = [
        finding.sentence for finding in known(verdict.counts).findings if finding.outcome == "regressed"
    ]
    assert sentences == [
        "objects kept per step: 0 -> 4 (list +2, dict +1, tuple +1), held by `__main__.kept`"
    ]


@pytest.mark.launch
def test_counts_exactly_with_a_disabled_collector(tmp_path: Path) -> None:
    """The script freezes its objects and disables the garbage collector. The leak is counted all the same."""
    text = LEAKS.replace("kept = []", "kept = []\nimport gc\ngc.collect()\ngc.freeze()\ngc.disable()")
    case = case_of(Script(path=script(tmp_path, text)), **COUNTED_ALONE)
    run = known_run(launch_once(case, detect(), tmp_path / "run"))
    assert known(run.counts[0].counts.kept).total == 4
    assert {FROZEN, DISABLED} <= {*run.notes}
    assert run.figures.gc_s_per_step == 0


def known_run(run: Run) -> Run:
    assert run.failure is None, run.failure
    return run
