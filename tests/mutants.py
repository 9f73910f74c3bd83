"""Mutation tests: change one token of a module, and see whether a unit test of that module fails.

    python -m tests.mutants --sample 90 --seed 1 [perfsuite/case/hardware.py ...]

cosmic-ray makes the mutants and runs the tests; what it lacks stands here: a random sample, the tests of the
mutated module alone, and `any`/`all`, `min`/`max`. Works in a copy of the repository. Exit status 1 if fewer
than `ENOUGH` of the mutants are killed.
"""

import argparse
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).parent.parent
ENOUGH = 0.92
MODULES = (
    *("perfsuite/case/hardware.py", "perfsuite/launch/hang.py", "perfsuite/node/health_sampler.py"),
    *("perfsuite/analysis", "perfsuite/results", "perfsuite/verdict"),
)
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Mul|Pow_Mul)"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Is_IsNot|IsNot_Is)"
    r"|ReplaceUnaryOperator_(USub_UAdd|Delete_Not)|AddNot|ReplaceTrueWithFalse|ReplaceFalseWithTrue"
    r"|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceBreakWithContinue|ReplaceContinueWithBreak|NumberReplacer)"
    r"|perfsuite/.*"
)
"""One or two for each kind of token. Not `|` and `*`, which stand in annotations and signatures, too."""
LEFT_OUT = {
    "": {  # in every module
        r"@dataclass\(.*(frozen|kw_only)=False.*\)": "nothing is changed or made by position",
        r"/,|.*[(,] /, \w+.*": "`*` of a signature: nothing is computed",
        r".*\b(9{9,}|10{8,}1)\.0.*": "a part in 10^9",
    },
    "analysis/agreement.py": {
        r".*reports\[ -1\]\.(tokens_per_step|world_size).*": "collect has checked that ranks agree",
        r"flops = reports\[ -1\]\.flops": "those of the whole model, which each rank knows",
        r".*(evidence\[ -?1\]|(of_ranks|seen)\[ -1\])\.data_parallel.*": "the case says it, of all ranks",
        r"samples = fmean\(each\.samples or -?1 .*": "ranks without samples are left out before",
        r"self\.tokens = fmean\(evidence\.tokens or -?1 .*": "ranks without tokens are left out before",
    },
    "analysis/trace.py": {
        r"return number if number < self\.steps else - 2": "no step has this number either",
    },
    "case/hardware.py": {
        r".*self\.compute_capability or \((?!0, 0\)).*": "every card that is known is newer",
    },
    "results/amounts.py": {
        r".*if 0 (<= abs\(value\) <|< abs\(value\) <=) 100 .*": "0 and 100 read the same",
    },
    "results/baseline.py": {
        r"if tenth <= 1:": "of ten steps each mean is over one",
    },
    "analysis/collect.py": {
        r".*strict=False\).*": "checked just before: as many values of each rank",
        r"if nodes >= 1:": "the ranks of one node have one host",
        r"first = reports\[ -1\]": "where ranks disagree, that is told first",
    },
    "analysis/figures.py": {
        r".*in zip\(steps, (lag|behind), strict=False\).*": "both have one entry a rank",
        r"is_replicated = .* < 1e-6 .*": "no difference is just the bound",
        r"middle = \(start - count\) // 2": "the same step, counted from the end",
    },
    "analysis/health.py": {
        r"UNKNOWN = Health\(samples=0, .*= ?-?1.*": "nobody reads them without samples",
        r".*\.get\(name, -1\).*": "no share is below 0, and both are no throttling",
        r"return \(slowest, fastest, lag\) if lag >= .*": "no quotient of floats is just 0.1 below 1",
    },
    "results/count_baseline.py": {
        r"return self\.counts\[ -1\]\.counts\.method": "all ranks are counted by one method",
    },
    "results/counts.py": {
        r".*counts=group\[max\(group\)\]\).*": "the counts of a group are equal",
    },
    "results/quantities.py": {
        r"allowed=lambda counts: -?1 if counts\.memory is None .*": "nothing is read without memory",
    },
    "results/run_dir.py": {
        r"return sorted\(stacks, key=lambda each: \( ?- ?2 if .*": "before every rank, as -1 is",
        r"return sorted\(.*key=lambda each: each\.number or -?1\)": "only for mypy: None is left out before",
    },
    "analysis/cause.py": {
        r"innermost = place\.splitlines\(\)\[ 0:2\]": "the head of a stack names no file",
    },
    "verdict/loss.py": {
        r".* apart >= CLEAR .*": "the same norms are told by nobody",
        r"apart = .*min\(second\) - min\(first\)\)": "`CLEAR` times apart, no sides overlap",
        r".*default= -1\)": "range(-1) is as empty as range(0)",
        r".* if mean else -1\.0 for .*": "it sorts as 0; at the median a spread allows more",
        r".*zip\(spreads, means, strict=False\).*": "both have one value for each tenth",
    },
    "verdict/comparability.py": {
        r".* abs\(math\.log\(today / then\)\) >= .*": "no quotient has a logarithm of just 0.1",
    },
    "verdict/count_sentences.py": {
        r".*if \(by\[name\] > -1\) == is_new.*": "what is 0 is left out before",
        r".*changes\[ -1\].*": "a group and graphs change in one field",
    },
    "verdict/paired_comparison.py": {
        r'return "regressed" if seen\.change >= 0 .*': "it is beyond the tolerance: not 0",
        r".*(size >= t_quantile|\* error (>|<=) slow).*": "no estimate is just the bound",
    },
    "verdict/exact.py": {
        r"noise = -1 if .*": "it is no more than the floor, and nothing is within it",
        r".*zip\(by, launches, strict=False\).*": "`by` has one for each launch",
        r".* > MANY_MORE \* quantity\.calls\(before\) >= 0 .*": "the same bytes need a call before, too",
        r"return 6": "it stays the last",
    },
    "verdict/judge.py": {
        r".*unjudged\(metric, runs\[ -1\], .*": "all launches are of one case",
        r".*runs\[ -?1\]\.machine\.device.*": "all launches of a case are on one hardware class",
        r'outcome = "regressed" if worsening >= 0 .*': "it is beyond the tolerance: not 0",
    },
    "verdict/arms.py": {
        r".*zip\(\*(failed|healthy), strict=False\)": "of each pair there are both",
        r".*\bb\[ -1\]\.machine\.device.*": "all launches of an arm are on one machine",
        r".*zip\(\(ARM_A, ARM_B\), pair, strict=False\).*": "of each pair there are both",
        r".*worst_verdict\(checks, len\(a\) - len\(b\)\).*": "`arms` counts the launches itself, at its end",
    },
    "verdict/noise.py": {
        r".*zip\(row, shared, strict=False\).*": "`shared` has one for each of a row",
        r"of_one_case = .* else -1\.0": "no more than 0 in both places",
    },
    "verdict/robust.py": {
        r"return math\.expm1\(logarithm\) if logarithm (<= 700|< 699|< 701) .*": "floats end at 709",
        r".*math\.sqrt\(degrees \* .* if exponent (<= 700|< 699|< 701) else math\.inf": "floats end at 709",
        r".*if q <= top else top for q in squares.*": "at the bound, the value is the bound",
        r"for _ in range\( (99|101)\):.*": "the iteration ends long before",
        r".*high if x >= high else x for x in logs.*": "at the bound, the value is the bound",
        r".*low if x <= low else high .*": "at the bound, the value is the bound",
    },
    "verdict/sequential.py": {
        r".*(change \+ half >|change - half <|change <=) .*": "no estimate is just the bound",
        r"(regresses = change \+ shift >=|passes = change - shift .* <=) .*": "no estimate is just the bound",
    },
    "verdict/waivers.py": {
        r".*round\(regression\.share, 7\).*": "it, too, takes off what floats add",
    },
    "launch/hang.py": {
        r"self\._longest_warm_up_s = -?1\.0  #.*": "three times as long is less than `HANG_S`",
        r"self\._last_at = -?1\.0": "the first sign of life sets it before it is read",
        r"warm_up_s = -?1\.0 if self\._longest_s .*": "three times as long is less than `HANG_S`",
    },
    "node/health_sampler.py": {
        r"energy_j=.*(after or ?-?1\b|before or ?-?1\b).*": "only for mypy: both are known",
        r"devices: int = -?1,": "without NVML nobody reads it",
        r"self\._step = -?\d": "the first sample is due anyway",
        r"self\._whole_at = [-+]WHOLE_EVERY_S": "the first sample is due anyway",
        r"while any\(\(size or -?1\) > HELD_BYTES .*": "so little is no more than `HELD_BYTES`",
        r".*zip\(.*, strict=False\).*": "every look and the cards are of the same GPUs",
    },
}
"""Mutants that no test can or should kill, by module and changed line (a regular expression): the reason."""


class Swap(Operator):  # type: ignore[misc]
    """`any` becomes `all`, `min` becomes `max`, and back."""

    OTHER: ClassVar = {"any": "all", "all": "any", "min": "max", "max": "min"}

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "name" and node.value in self.OTHER and node.get_next_leaf().value == "(":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = self.OTHER[node.value]
        return node

    @classmethod
    def examples(cls) -> Sequence[Any]:
        return ()


def mutants(module: Path) -> Iterator[MutationSpec]:
    """Every mutant of a module."""
    tree = get_ast_from_path(module)
    for name in filter(OPERATORS.fullmatch, cosmic_ray.plugins.operator_names()):
        operator = cosmic_ray.plugins.get_operator(name)()
        places = [place for node in ast_nodes(tree) for place in operator.mutation_positions(node)]
        for number, (start, end) in enumerate(places):
            yield MutationSpec(module, name, number, start, end)


def command(module: Path) -> str:
    """The unit tests of a module: the file of its name, or, without one, the folder of its package."""
    folder = Path("tests", *module.parts[1:-1])
    file = folder / f"test_{module.name}"
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    tests = str(file if file.exists() else folder)
    return shlex.join([sys.executable, "-m", "pytest", *options, "-m", "unit", tests])


def changed_line(mutant: MutationSpec) -> str:
    """The first line that a mutant changes, as changed."""
    before = mutant.module_path.read_text()
    operator = cosmic_ray.plugins.get_operator(mutant.operator_name)()
    after: str | None = mutate_code(before, operator, mutant.occurrence)
    assert after is not None
    lines = zip(before.splitlines(), after.splitlines(), strict=True)
    return next(new.strip() for old, new in lines if old != new)


def is_left_out(mutant: MutationSpec) -> bool:
    """Whether `LEFT_OUT` names a mutant."""
    lines = {**LEFT_OUT[""], **LEFT_OUT.get(mutant.module_path.relative_to("perfsuite").as_posix(), {})}
    return any(re.fullmatch(line, changed_line(mutant)) for line in lines)


def copy(directory: Path) -> None:
    """Copy what git tracks or would track."""
    listed = ("git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation tests: see CONTRIBUTING.md.")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds draw equal samples of equal code")
    parser.add_argument("paths", nargs="*", default=MODULES, help="modules or folders")
    options = parser.parse_args()
    cosmic_ray.plugins.OPERATOR_PROVIDERS["perfsuite"] = {"Swap": Swap}
    with tempfile.TemporaryDirectory() as directory:
        copy(Path(directory))
        os.chdir(directory)
        files = [file for path in map(Path, options.paths) for file in sorted([path, *path.rglob("*.py")])]
        every = [mutant for file in files if file.is_file() for mutant in mutants(file)]
        random.Random(options.seed).shuffle(every)
        counted = (mutant for mutant in every if not is_left_out(mutant))
        chosen = list(islice(counted, options.sample or None))
        return test(sorted(chosen, key=lambda mutant: (mutant.module_path, mutant.start_pos)))


def test(chosen: Sequence[MutationSpec]) -> int:
    """Test each mutant, tell the survivors, and return the exit status."""
    alive = 0
    timeouts: dict[Path, float] = {}
    for number, mutant in enumerate(chosen, 1):
        module = mutant.module_path
        if module not in timeouts:
            began = time.monotonic()
            outcome, output = run_tests(command(module), 600)
            assert outcome is TestOutcome.SURVIVED, f"{command(module)} fails without a mutant: {output}"
            timeouts[module] = 30 + 5 * (time.monotonic() - began)
        result = mutate_and_test([mutant], command(module), timeouts[module])
        if result.test_outcome is not TestOutcome.KILLED:
            assert result.test_outcome is TestOutcome.SURVIVED, result.output
            alive += 1
            place = f"{module}:{mutant.start_pos[0]}"
            print(f"{number}/{len(chosen)} alive: {place}: {changed_line(mutant)}", flush=True)
    share = 1 - alive / len(chosen)
    print(f"{len(chosen) - alive} of {len(chosen)} mutants killed ({share:.0%})")
    return 0 if share >= ENOUGH else 1


if __name__ == "__main__":
    sys.exit(main())
