"""Mutation tests: change one token of a module, and see whether a unit test of that module fails.

    python -m tests.mutants --sample 90 --seed 1 [perfsuite/case/hardware.py ...]

cosmic-ray makes the mutants and runs the tests. This module adds what it lacks: random samples, running the
tests of the mutated module only, and mutants of `any`/`all` and `min`/`max`. It works in a copy of the
repository. The exit status is 1 if fewer than `ENOUGH` of the mutants are killed.
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
"""One or two operators for each kind of token. `|` and `*` are left out, since annotations and signatures
have them, too."""
EVERYWHERE = {
    r"@dataclass\((frozen=True)?(, )?(kw_only=True)?\)": "nothing is changed or made by position",
    r"(?<=[(,] )\*(?=, \w)|^ *\*,$": "`*` of a signature: nothing is computed",
    r"\b1e(9|\d\d)\b": "a part in 10^9",
}
"""Pieces of code whose mutants no test should kill, in any module: a regular expression -> the reason."""
PRAGMA = re.compile(r"# pragma: no mutate(?: (?P<old>.+?)(?: to (?P<new>.+?))?)?: (?P<reason>.+)")
"""The pragma that explains why no test can kill a mutant. It is behind the line or in a comment just above.

    device = runs[0].machine.device  # pragma: no mutate: all launches are of one device
    # pragma: no mutate 0): a byte is not more than `HELD_BYTES`
    while any((size or 0) > HELD_BYTES for size in held) and self._clock() < until:
    claimed = reports[0].tokens_per_step  # pragma: no mutate [0] to [-1]: all ranks have the same

The first form leaves out all mutants of the line. The second leaves out the mutants inside the named piece of
code. The third leaves out only the mutant that makes this change.
"""


class Swap(Operator):  # type: ignore[misc]
    """Turns `any` into `all` and `min` into `max`, and the other way round."""

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
    """Yield every mutant of a module."""
    tree = get_ast_from_path(module)
    for name in filter(OPERATORS.fullmatch, cosmic_ray.plugins.operator_names()):
        operator = cosmic_ray.plugins.get_operator(name)()
        places = [place for node in ast_nodes(tree) for place in operator.mutation_positions(node)]
        for number, (start, end) in enumerate(places):
            yield MutationSpec(module, name, number, start, end)


def command(module: Path) -> str:
    """Return the command of a module's unit tests: those of its own file, or of its package's folder."""
    folder = Path("tests", *module.parts[1:-1])
    file = folder / f"test_{module.name}"
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    tests = str(file if file.exists() else folder)
    return shlex.join([sys.executable, "-m", "pytest", *options, "-m", "unit", tests])


def changed_line(mutant: MutationSpec) -> str:
    """Return the first line that a mutant changes, after the change."""
    before = mutant.module_path.read_text()
    operator = cosmic_ray.plugins.get_operator(mutant.operator_name)()
    after: str | None = mutate_code(before, operator, mutant.occurrence)
    assert after is not None
    lines = zip(before.splitlines(), after.splitlines(), strict=True)
    return next(new.strip() for old, new in lines if old != new)


def pragmas(lines: Sequence[str], number: int) -> Iterator[re.Match[str]]:
    """Yield the pragmas of a line: the one behind it, and those in the comments just above it."""
    first = number - 1
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    for line in lines[first:number]:
        pragma = PRAGMA.search(line)
        if pragma is not None:
            yield pragma


def is_meant(pragma: re.Match[str], mutant: MutationSpec, line: str) -> bool:
    """Whether a pragma of a mutant's line is about this mutant."""
    old, new = pragma["old"], pragma["new"]
    if old is None:
        return True
    code = PRAGMA.sub("", line)
    assert code.count(old) == 1, f"{mutant.module_path}: {old!r} not exactly once in {code.strip()!r}"
    if new is None:
        return is_inside(mutant, code.index(old), code.index(old) + len(old))
    return is_inside(mutant, 0, len(code)) and (
        spaceless(code.replace(old, new)) == spaceless(PRAGMA.sub("", changed_line(mutant)))
    )


def is_inside(mutant: MutationSpec, begin: int, end: int) -> bool:
    """Whether a mutant changes only text between two columns of its line."""
    row, column = mutant.start_pos
    end_row, end_column = mutant.end_pos
    is_within: bool = row == end_row and begin <= column and end_column <= end
    return is_within


def spaceless(text: str) -> str:
    return "".join(text.split())


def is_left_out(mutant: MutationSpec) -> bool:
    """Whether no test can or should kill a mutant, according to `EVERYWHERE` or a pragma of its line."""
    lines = mutant.module_path.read_text().splitlines()
    number, _ = mutant.start_pos
    line = lines[number - 1]
    if any(is_meant(pragma, mutant, line) for pragma in pragmas(lines, number)):
        return True
    pieces = [piece.span() for code in EVERYWHERE for piece in re.finditer(code, line)]
    return any(is_inside(mutant, *span) for span in pieces)


def unused_pragmas(module: Path) -> list[str]:
    """Return the lines with pragmas that leave out no mutant of a module."""
    lines = module.read_text().splitlines()
    used = {
        pragma.string
        for mutant in mutants(module)
        for pragma in pragmas(lines, mutant.start_pos[0])
        if is_meant(pragma, mutant, lines[mutant.start_pos[0] - 1])
    }
    return [line.strip() for line in lines if PRAGMA.search(line) and line not in used]


def copy(directory: Path) -> None:
    """Copy the files that git tracks or would track."""
    listed = ("git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, directory / name)


def main() -> int:
    parser = argparse.ArgumentParser(description="Mutation tests: see CONTRIBUTING.md.")
    parser.add_argument("--sample", type=int, default=0, help="number of mutants to draw at random; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="same seed and code: same sample")
    parser.add_argument("paths", nargs="*", default=MODULES, help="modules or folders")
    options = parser.parse_args()
    cosmic_ray.plugins.OPERATOR_PROVIDERS["perfsuite"] = {"Swap": Swap}
    with tempfile.TemporaryDirectory() as directory:
        copy(Path(directory))
        os.chdir(directory)
        files = [file for path in map(Path, options.paths) for file in sorted([path, *path.rglob("*.py")])]
        all_mutants = [mutant for file in files if file.is_file() for mutant in mutants(file)]
        random.Random(options.seed).shuffle(all_mutants)
        stale = [pragma for file in files if file.is_file() for pragma in unused_pragmas(file)]
        if stale:
            raise SystemExit("\n".join(["these pragmas leave out no mutant: delete or correct them", *stale]))
        counted = (mutant for mutant in all_mutants if not is_left_out(mutant))
        chosen = list(islice(counted, options.sample or None))
        return test(sorted(chosen, key=lambda mutant: (mutant.module_path, mutant.start_pos)))


def test(chosen: Sequence[MutationSpec]) -> int:
    """Test each mutant, print the survivors, and return the exit status."""
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
