"""Let torch.compile work on fake tensors, without generating kernels. Worker side; imports torch.

Dynamo captures graphs, and inductor changes and partitions them, as in a launch. Inductor's last part, which
fuses operators and generates kernels for a real device, is left out. The operators of the graphs are called
instead.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import get_testing_overrides

from perfsuite.dry import attention
from perfsuite.errors import DryRunError, PerfsuiteError
from perfsuite.frameworks.common import private
from perfsuite.frameworks.common.patches import wrap
from perfsuite.frameworks.common.private import current_dispatch_mode_stack, disable_current_modes
from perfsuite.results.counts import Compiled, Counts

GRAPHS_AS_OPERATORS = (
    "torch.compile generated no kernels. Its partitioned graphs were counted, with their FLOPs, their "
    "collectives and the tensors saved for backward, but {} are unknown"
)
OTHER_BACKEND = "torch.compile used a backend other than inductor: its kernels are unknown"
UNKNOWN_OF_ALL = ("kernels", "fusion")
OPTIONS_OF_AUTOTUNING = frozenset({
    "coordinate_descent_tuning", "max_autotune", "max_autotune_gemm", "max_autotune_pointwise",
})  # fmt: skip
EXPLANATION = "Explanation:"  # start of the line in dynamo's messages that says why a graph breaks
OPTION_OF_CUDA_GRAPHS = "triton.cudagraphs"
NOT_ON_FAKE_TENSORS: Mapping[str, Any] = {
    # With more threads, inductor would start processes that compile kernels.
    "compile_threads": 1,
    # If true, inductor measures matrix products on the device, to decide whether to pad them.
    "shape_padding": False,
    # If true, inductor computes constants in graphs, as real tensors on the device.
    "joint_graph_constant_folding": False,
}
"""Inductor's options that a dry run needs."""


class Compilation:
    """The use of torch.compile in this process. Create the object before torch's functions are replaced."""

    def __init__(self) -> None:
        self._unknown = dict[str, None]()  # what is unknown about the compiled code, in order
        self._is_prepared = False  # whether dynamo's function is replaced
        self._has_inductor = False  # whether inductor's function is replaced
        # Make torch create and keep the tables that dynamo needs. Torch can no longer create them once two of
        # its functions have the same replacement.
        get_testing_overrides()

    def pretend(self) -> None:
        """Let torch.compile work for the rest of this process.

        Dynamo and inductor are not loaded before the first call of torch.compile.
        """
        wrap(torch, "compile", self._prepared)

    def _prepared(self, torch_compile: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(torch_compile)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            if not self._is_prepared:
                self._is_prepared = True
                wrap(*private.place("dynamo_compile"), self._without_modes)
                attention.keep_from_dynamo()
            return torch_compile(*args, **kwargs)

        return compiled

    def _without_modes(self, compile_frame: Callable[..., Any]) -> Callable[..., Any]:
        """Compile outside the dispatch modes of a dry run: dynamo creates fake tensors in its own mode."""

        @functools.wraps(compile_frame)
        def compiled(*args: Any, **kwargs: Any) -> Any:
            with disable_current_modes():
                if not self._has_inductor:
                    self._has_inductor = True
                    wrap(*private.place("compile_fx"), self._without_kernels)
                return compile_frame(*args, **kwargs)

        return compiled

    def notes(self, counts: Counts) -> tuple[str, ...]:
        """Return a note that says what is unknown, if anything was compiled."""
        if counts.compiled is None:
            return ()
        if not self._unknown:
            return (OTHER_BACKEND,)
        *others, last = self._unknown
        return (GRAPHS_AS_OPERATORS.format(f"{', '.join(others)} and {last}"),)

    def _without_kernels(self, compile_fx: Callable[..., Any]) -> Callable[..., Any]:
        inductor = private.inductor_config
        autograd = private.functorch_config

        @functools.wraps(compile_fx)
        def compiled(
            graph: Any, inputs: Any, *_: Any, config_patches: dict[str, Any] | None = None, **__: Any
        ) -> Any:
            options = config_patches or {}
            self._note(options)
            # Disable the autograd cache, so that a dry run does not store graphs that lack kernels.
            with (
                inductor.patch({**options, **NOT_ON_FAKE_TENSORS, OPTION_OF_CUDA_GRAPHS: False}),
                autograd.patch(enable_autograd_cache=False),
            ):
                return compile_fx(graph, inputs, inner_compile=_as_operators)

        return compiled

    def _note(self, options: Mapping[str, Any]) -> None:
        is_tuned = any(options.get(name) for name in OPTIONS_OF_AUTOTUNING)
        unknown = [
            *UNKNOWN_OF_ALL,
            *(["autotuning"] if is_tuned else []),
            *(["CUDA graphs"] if options.get(OPTION_OF_CUDA_GRAPHS) else []),
        ]
        self._unknown |= dict.fromkeys(unknown)


def explained(error: Exception) -> PerfsuiteError | None:
    """Return an error of torch.compile as one sentence, or None for any other error."""
    errors = private.if_loaded("dynamo_errors")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if errors is None:
        return None
    if isinstance(error, errors.BackendCompilerFailed):
        return DryRunError(
            f"a dry run cannot do this: a backend of torch.compile failed, {' '.join(lines[:2])}. "
            "Launch the case, or compile with inductor"
        )
    # Without fullgraph=True, dynamo breaks the graph and does not raise this error.
    if isinstance(error, errors.Unsupported):
        explanation = next((line for line in lines if line.startswith(EXPLANATION)), "")
        why = f"{lines[0]}. {explanation.removeprefix(EXPLANATION).strip()}".rstrip(" .")
        return PerfsuiteError(
            f"fullgraph=True asks for one whole graph, but torch.compile cannot capture it: {why}"
        )
    return None


def without_kernels(counts: Counts, compiled: Compiled | None) -> Counts:
    """Add the results of torch.compile to `counts`. If anything was compiled, kernels become unknown."""
    if compiled is None:
        return counts
    return counts.replace(
        compiled=compiled.replace(kernels=None, extern_calls=None),
        kernels=None,
        spans={name: span.replace(kernels=None) for name, span in counts.spans.items()},
    )


def _as_operators(graph: Any, inputs: Any, **_: Any) -> Any:
    """Replace inductor's `compile_fx_inner`: return a function that calls the operators of a graph."""
    call = private.boxed_nop(graph, inputs)

    # `call` has the attribute `_boxed_call`, which `wraps` copies to `run`. A function with this attribute
    # empties its list of arguments, to free tensors early.
    @functools.wraps(call)
    def run(arguments: Any) -> Any:
        # Generated kernels would need fewer Python calls, so the Python calls here are not counted.
        counters = [mode for mode in current_dispatch_mode_stack() if hasattr(mode, "end_step")]
        return counters[0].python.unseen(call, arguments) if counters else call(arguments)

    return run
