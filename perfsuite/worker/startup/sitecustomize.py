"""Attach perfsuite to every Python process of a measured script.

Python runs this module because its directory is the first entry of PYTHONPATH. The module starts the clock of
the start-up. It also runs the environment's own sitecustomize, because Python does not find that one any
more. When torch has been imported, the module runs `perfsuite.worker.script.attach`.
"""

import os
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

CLOCK = "perfsuite.worker.clock.startup_clock"
_clock: ModuleType | None = None  # the module of the clock. None if this process is not measured


class AfterTorch:
    """A finder that lets the other finders load torch, and attaches perfsuite after torch was executed."""

    _asking = threading.local()

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return None for every module except torch."""
        # Do nothing while this finder waits for another finder, because that finder can ask all finders
        # again, including this one.
        if name != "torch" or getattr(cls._asking, "now", False):
            return None
        cls._asking.now = True
        try:
            others = (
                other for other in tuple(sys.meta_path) if other is not cls and hasattr(other, "find_spec")
            )
            specs = (finder.find_spec(name, path, target) for finder in others)
            spec = next((spec for spec in specs if spec is not None), None)
            if spec is not None and spec.loader is not None:
                _then_attach(spec.loader)
        except Exception as error:  # return None, so that Python asks the other finders
            _tell(error)
            return None
        finally:
            cls._asking.now = False
        return spec


def _then_attach(loader: Any) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        if AfterTorch not in sys.meta_path:
            return  # perfsuite is already attached: somebody has requested a loader twice
        sys.meta_path.remove(AfterTorch)
        if _clock is not None:
            sys.modules[CLOCK] = _clock
            _clock.pause()
        try:
            from perfsuite.worker.script.attach import attach

            attach()
        except Exception as error:
            is_missing = isinstance(error, ModuleNotFoundError) and not f"{error.name}.".startswith("torch.")
            # Report any other error without ending the script. For example, a version of torch can lack a
            # module.
            if not is_missing:
                _tell(error)
                return
            raise ImportError(
                f"perfsuite measures this command, but {sys.executable} cannot import perfsuite ({error}). "
                "Install perfsuite in the environment of the command"
            ) from error
        finally:
            if _clock is not None:
                _clock.go_on()

    loader.exec_module = exec_module


def _tell(error: Exception) -> None:
    import contextlib
    import traceback

    traceback.print_exception(error)
    with contextlib.suppress(Exception):
        from perfsuite.worker.rank import report_error

        report_error(error)


def _begin_clock() -> ModuleType | None:
    """Load the clock module by its path and start the clock.

    The module is not imported in the usual way, because its package would import too much into a script.
    Until torch is imported, the module is not in `sys.modules`. Returns None if the clock cannot be started.
    The start-up is then not timed.
    """
    try:
        here = os.path.dirname(os.path.realpath(__file__))
        spec = spec_from_file_location(
            CLOCK, os.path.join(os.path.dirname(here), "clock", "startup_clock.py")
        )
        assert spec is not None
        assert spec.loader is not None
        clock = module_from_spec(spec)
        spec.loader.exec_module(clock)
        clock.begin(clock.IMPORTS)
    except Exception as error:
        sys.stderr.write(f"perfsuite: the start-up is not timed: {type(error).__name__}: {error}\n")
        return None
    return clock


def _run_the_shadowed() -> None:
    here = os.path.dirname(os.path.realpath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.realpath(entry) != here]
    spec = PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


if "PERFSUITE_RUN_DIR" in os.environ:
    sys.meta_path.insert(0, AfterTorch)
    _clock = _begin_clock()
_run_the_shadowed()
