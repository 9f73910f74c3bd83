"""Change nanotron 0.4 so that it runs. For the worker; imports torch. Only `load` changes anything.

`load` imports nanotron through a finder of this module, which changes nanotron's source text in memory. No
installed file is changed, no `.pyc` of nanotron is read or written, and nothing outside nanotron is replaced.

| where | what | why |
| --- | --- | --- |
| everywhere | `nanotron.logging` does not import `LoggingArgs` | the release has a circular import |
| everywhere | wandb is not used | nanotron would log each step if wandb is installed |
| sdpa | flash_attn's attention, RMSNorm and rotary embedding become torch's | flash_attn needs a GPU |
| CPU | "cuda" becomes "cpu"; calls of torch.cuda that need a GPU become `pass` | nanotron hard-codes both |
| CPU | initial weights are averaged through `.data` | gloo divides in place, which autograd rejects |
| CPU | pipeline sends do not wait | in 1f1b, both ends send at the same time and rely on NCCL's buffers |
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import itertools
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from perfsuite.errors import MismatchError
from perfsuite.frameworks.nanotron.config import VERSION

# A change of source text: module (None for all modules), pattern, replacement.
Change = tuple[str | None, bytes, bytes]
_ALWAYS: tuple[Change, ...] = (
    ("nanotron.logging", rb"from nanotron\.config\.config import LoggingArgs", b"LoggingArgs = object"),
)
_FALLBACKS: tuple[Change, ...] = tuple(
    (module, rb"from flash_attn[.\w]* import", b"from perfsuite.frameworks.nanotron.compat import")
    for module in ("nanotron.models.llama", "nanotron.models.starcoder2", "nanotron.nn.layer_norm")
)
_CPU: tuple[Change, ...] = (
    (None, rb'"cuda"', b'"cpu"'),
    ("nanotron.parallel.context", rb"torch\.cuda\.set_device\(.*\)", b"pass"),
    ("nanotron.trainer", rb"torch\.cuda\.synchronize\(\)", b"pass"),
    ("nanotron.trainer", rb"dist\.all_reduce\(param,", b"dist.all_reduce(param.data,"),
    ("nanotron.logging", rb"torch\.cuda\.reset_peak_memory_stats\(\)", b"pass"),
)


@functools.cache
def load(*, cpu: bool, flash_attn: bool) -> str:
    """Import nanotron with the changes, and return a list of them. Later calls only return the list.

    Raises `MismatchError` if the installed version is not 0.4.
    """
    version = importlib.metadata.version("nanotron")
    if version != VERSION:
        raise MismatchError(
            f"nanotron {version} is installed, but perfsuite needs {VERSION}: pip install nanotron=={VERSION}"
        )
    changes = {"circular import": _ALWAYS, "torch for flash_attn": () if flash_attn else _FALLBACKS}
    changes["cpu and gloo for cuda and nccl"] = _CPU if cpu else ()
    finder = _Finder(list(itertools.chain(*changes.values())))
    # Insert the finder directly before Python's own. Finders that are already in front of Python's own stay
    # in front of this one, because they might have to act when a module of nanotron is imported. For example,
    # `AfterImport` then adds the hooks that recognise checkpoints.
    finders = sys.meta_path
    finders.insert(finders.index(PathFinder) if PathFinder in finders else len(finders), finder)
    trainer: Any = importlib.import_module("nanotron.trainer")
    trainer.wandb = None
    if cpu:
        _send_without_waiting()
    return ", ".join(what for what, made in changes.items() if made)


class _Finder(MetaPathFinder):
    """Finds nanotron's modules, and gives them a loader that changes their source text."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = changes

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "nanotron":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            changes = [change for change in self.changes if change[0] in (None, name)]
            spec.loader = _Loader(name, spec.loader.path, changes)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, changes: Sequence[Change]) -> None:
        super().__init__(name, path)
        self.changes = changes

    def get_code(self, fullname: str) -> Any:
        """Return the code compiled from the changed text, bypassing every cache."""
        path = self.get_filename(fullname)
        text = self.get_data(path)
        for module, old, new in self.changes:
            text, replaced = re.subn(old, new, text)
            if module is not None and not replaced:
                raise MismatchError(f"{path} differs from the release: it does not contain {old.decode()}")
        return self.source_to_code(text, path)


def _send_without_waiting() -> None:
    """Make sends return at once, as with NCCL. All sent tensors are kept until they have been received."""
    distributed: Any = importlib.import_module("nanotron.distributed")
    p2p: Any = importlib.import_module("nanotron.parallel.pipeline_parallel.p2p")
    engine: Any = importlib.import_module("nanotron.parallel.pipeline_parallel.engine")
    isend_tensors = p2p.P2P.isend_tensors
    on_their_way: list[tuple[Any, Tensor]] = []

    def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
        copy = tensor.clone()  # nanotron reuses the original, which is a buffer for shapes and strides
        on_their_way.append((distributed.isend(copy, dst, group=group, tag=tag), copy))

    def send_tensors(self: Any, tensors: list[Tensor], to_rank: int, tag: int = 0) -> None:
        for tensor in tensors:
            (work,) = isend_tensors(self, [tensor], to_rank, tag)
            on_their_way.append((work, tensor))

    def until_received(step: Any) -> Any:
        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            outputs = step(*args, **kwargs)
            for work, _ in on_their_way:
                work.wait()
            on_their_way.clear()
            return outputs

        return run

    distributed.send = send
    p2p.P2P.send_tensors = send_tensors
    for schedule in (engine.AllForwardAllBackwardPipelineEngine, engine.OneForwardOneBackwardPipelineEngine):
        schedule.train_batch_iter = until_received(schedule.train_batch_iter)


# Replacements for flash_attn in plain torch. They have the names and signatures that nanotron's training
# uses.

# nanotron imports these two names, but uses them only to generate text.
bert_padding = flash_attn_with_kvcache = None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    **_: Any,
) -> Tensor:
    """Compute attention over sequences of equal length.

    Inputs and output have the shape [sequences * length, heads, size].
    """
    sequences = cu_seqlens_q.numel() - 1
    assert q.shape[0] == sequences * max_seqlen_q, "sequences must have no padding"
    assert k.shape[0] == sequences * max_seqlen_k, "sequences must have no padding"
    query, key, value = (t.view(sequences, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    shares_heads = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(
        query, key, value, None, dropout_p, causal, scale=softmax_scale, enable_gqa=shares_heads
    )
    return out.transpose(1, 2).reshape(q.shape)


def layer_norm_fn(
    x: Tensor, weight: Tensor, bias: None, *, eps: float, is_rms_norm: bool, residual: None, **_: Any
) -> Tensor:
    """Compute RMSNorm over the last dimension."""
    assert is_rms_norm, "Llama has no other norm"
    assert bias is None, "RMSNorm has no bias"
    assert residual is None, "nanotron's Llama adds the residual itself"
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


class RotaryEmbedding(torch.nn.Module):
    """Rotary position embedding (Su 2021) of queries and keys, with theta 10000 and adjacent pairs."""

    def __init__(self, dim: int, *, interleaved: bool, base: float = 10000.0) -> None:
        super().__init__()
        assert interleaved, "nanotron's Llama interleaves"
        self.inverse = base ** -(torch.arange(0, dim, 2, device="cpu", dtype=torch.float32) / dim)
        self.rotation: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, *, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate `q`, [batch, length, heads, size], and the keys in `kv`, [batch, length, 2, heads, size]."""
        if self.rotation is None or self.rotation[0].shape[0] != q.shape[1]:
            positions = torch.arange(q.shape[1], device=q.device, dtype=torch.float32)
            angle = torch.outer(positions, self.inverse.to(q.device))[:, None]
            self.rotation = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
        return self._rotate(q), torch.stack((self._rotate(kv[:, :, 0]), kv[:, :, 1]), 2)

    def _rotate(self, x: Tensor) -> Tensor:
        assert self.rotation is not None
        cos, sin = self.rotation
        a = x[..., ::2]
        b = x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
