"""Helper: a library with an engine that steps an optimizer of torch, and a package that supports it."""

import importlib
from typing import Any

from tests.packages import Packages

FRAMEWORK = """
from typing import Any, ClassVar
from perfsuite.frameworks import Engine, Library
from perfsuite.frameworks.fake import Fake

class Driver(Engine):
    path: ClassVar[str] = "motor.driving:Driver"
    step: ClassVar[str] = "advance"
    not_dry: ClassVar[str | None] = "a motor needs fuel"

    def optimizers(self, engine: Any) -> list[Any]:
        return [engine.inner]

    def sharding(self, engine: Any) -> str | None:
        return f"motor in {engine.parts} parts"

    def gradient_norm(self, engine: Any) -> float | None:
        return engine.norm

    def loss_scale(self, engine: Any) -> float | None:
        return engine.scale

class Motor(Fake):
    name: ClassVar[str] = "motor"
    packages: ClassVar[tuple[str, ...]] = ("perf-motor",)
    library: ClassVar[Library] = Library(
        events={"motor.driving:save": "save checkpoint", "motor.driving:Driver.check": "evaluate"},
        clips=("motor.driving:Driver.clip",),
        engine=Driver(),
        shard="motor_part",
    )
"""
LIBRARY = """
import torch

class Driver(torch.nn.Module):
    parts = 2
    norm = None
    scale = None

    def __init__(self, inner):
        super().__init__()
        inner.step()  # to make its state
        self.inner = inner

    def step(self):
        self.advance()

    def advance(self):
        for part in range(self.parts):
            self.inner.step()

    def check(self):
        return "checked"

    def clip(self):
        return "clipped"

class Gear:
    def __init__(self, inner):
        self.inner = inner

    def step(self):
        self.advance()

    def advance(self):
        self.inner.step()

def elsewhere(inner):
    inner.step()

def save():
    return "saved"
"""


def install(packages: Packages) -> None:
    """Write the library and install the framework, but import neither."""
    folder = packages.directory / "motor"
    folder.mkdir()
    (folder / "__init__.py").write_text("import torch\n")
    (folder / "driving.py").write_text(LIBRARY)
    packages.install("perf-motor", FRAMEWORK, frameworks="motor = perf_motor:Motor")


def install_attaching(packages: Packages) -> None:
    """Do the same as `install`, for a library whose engine's module begins by calling `sys.attach`.

    It is like a module that begins by importing torch. Then perfsuite attaches while it is half imported.
    """
    install(packages)
    (packages.directory / "motor" / "__init__.py").write_text("")
    (packages.directory / "motor" / "driving.py").write_text(f"import sys; sys.attach()\n{LIBRARY}")


def install_as_one_file(packages: Packages) -> None:
    """Do the same as `install`, for a library that is a single file."""
    (packages.directory / "motor.py").write_text(LIBRARY)
    framework = FRAMEWORK.replace("motor.driving:", "motor:")
    packages.install("perf-motor", framework, frameworks="motor = perf_motor:Motor")


def driving() -> Any:
    """Import the library's module."""
    return importlib.import_module("motor.driving")
