import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from perfsuite.errors import DryRunError
from perfsuite.frameworks.common import patches


class Owner:
    def says(self) -> str:
        return "at first"


def test_wrapped_names_know_their_original() -> None:
    here = type("Here", (Owner,), {})
    patches.replace(here, "says", lambda self: "before")
    patches.wrap(here, "says", lambda says: lambda self: f"{says(self)} and after")
    assert here().says() == "before and after"
    assert Owner().says() == "at first"


def test_importers_of_a_name_get_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def function() -> None: ...

    owner, importer, other = (ModuleType(name) for name in ("owner", "importer", "other"))
    for module in (owner, importer):
        module.function = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    other.function = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "other", other)
    patches.replace_everywhere(owner, "function", patches.nothing)
    assert owner.function is importer.function is patches.nothing
    assert other.function is None


def test_aliases_of_a_name_get_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate has `from safetensors.torch import save_file as safe_save_file`."""

    def function() -> None: ...

    owner = ModuleType("owner")
    importer = ModuleType("importer")
    owner.function = importer.alias = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "importer", importer)
    patches.replace_everywhere(owner, "function", patches.nothing)
    assert importer.alias is patches.nothing


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch.distributed, "torch.distributed.renamed_in_this_release"),
        (torch.nn.Module, "torch.nn.modules.module.Module.renamed_in_this_release"),
        (torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear.renamed_in_this_release"),
    ],
    ids=["a module", "a class", "an object"],
)
@pytest.mark.parametrize("how", [patches.replace, patches.replace_everywhere, patches.wrap])
def test_a_name_that_has_gone_is_one_clear_error(
    how: Callable[..., object], owner: object, name: str
) -> None:
    with pytest.raises(DryRunError) as caught:
        how(owner, "renamed_in_this_release", patches.nothing)
    said = rf"^torch has no {name}, .*constraints.txt.*launch the case for real"
    assert re.search(said, str(caught.value))


def test_a_module_that_has_gone_is_one_clear_error() -> None:
    assert patches.module("torch.distributed") is torch.distributed
    with pytest.raises(DryRunError, match=r"has no torch.distributed.renamed.again, which a dry run"):
        patches.module("torch.distributed.renamed.again")


def test_missing_names_keep_their_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_module.py").write_text("import nosuch_package\n")
    with pytest.raises(ModuleNotFoundError, match="nosuch_package"):
        patches.module("broken_module")
