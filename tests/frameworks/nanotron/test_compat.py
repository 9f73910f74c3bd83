import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from perfsuite.errors import MismatchError
from perfsuite.frameworks.nanotron import compat
from tests.processes import python

LOOK = """
import hashlib, sys
from importlib.util import find_spec
from pathlib import Path

def files():
    root = Path(find_spec("nanotron").origin).parent
    return {str(f): hashlib.sha256(f.read_bytes()).hexdigest() for f in root.rglob("*") if f.is_file()}

import torch, torch.cuda, torch.distributed, torch.nn.functional

def others():
    modules = (torch, torch.cuda, torch.distributed, torch.nn.functional, torch.nn.Module, torch.Tensor)
    return [{name: id(value) for name, value in vars(module).items()} for module in modules]

before = files(), others(), list(sys.meta_path)
import perfsuite.frameworks.nanotron.compat as compat
assert (files(), others(), list(sys.meta_path)) == before, "importing it changes something"
said = compat.load(cpu=True, flash_attn=False)
from nanotron.models import llama
assert files() == before[0], "installed files are changed"
assert others() == before[1], "torch is changed"
assert "flash_attn" not in sys.modules and find_spec("flash_attn") is None, "flash_attn is feigned"
print(said, llama.flash_attn_varlen_func.__module__, sep="; ", end="")
"""


@pytest.mark.launch
def test_changes_nanotron_in_memory_only() -> None:
    changed = "circular import, torch for flash_attn, cpu and gloo for cuda and nccl"
    assert python(LOOK) == f"{changed}; perfsuite.frameworks.nanotron.compat"


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "0.5")
    with pytest.raises(MismatchError, match=r"nanotron 0\.5 is installed, .* pip install nanotron==0\.4"):
        compat.load(cpu=True, flash_attn=False)


def test_a_changed_package_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trainer.py"
    file.write_text("import torch\n")
    change = ("nanotron.trainer", rb"torch\.cuda\.synchronize\(\)", b"pass")
    loader = compat._Loader("nanotron.trainer", str(file), [change])
    with pytest.raises(MismatchError, match=r"trainer.py differs from the release: it does not contain"):
        loader.get_code("nanotron.trainer")
    file.write_text("torch.cuda.synchronize()\n")
    exec(loader.get_code("nanotron.trainer"), {})
    assert not (tmp_path / "__pycache__").exists()


def test_finds_only_nanotron() -> None:
    finder = compat._Finder([])
    assert finder.find_spec("nanotronic", None) is None
    assert finder.find_spec("torch.nanotron", None) is None


def test_attention_is_causal_and_shares_heads() -> None:
    """Two sequences have three tokens each, and four heads share two heads of keys and values."""
    q = torch.randn(6, 4, 8)
    k = torch.randn(6, 2, 8)
    v = torch.randn(6, 2, 8)
    options: dict[str, Any] = {"dropout_p": 0.0, "softmax_scale": None, "causal": True, "max_seqlen_k": 3}
    options |= {"cu_seqlens_q": torch.tensor([0, 3, 6]), "max_seqlen_q": 3, "return_attn_probs": False}
    out = compat.flash_attn_varlen_func(q, k, v, **options)
    for first in (0, 3):
        for head in range(4):
            rows = slice(first, first + 3)
            scores = q[rows, head] @ k[rows, head // 2].T / 8**0.5
            scores = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf"))
            torch.testing.assert_close(out[rows, head], scores.softmax(-1) @ v[rows, head // 2])


def test_rotary_embedding_turns_neighbouring_pairs() -> None:
    """Each pair of neighbours is a complex number. It is rotated by the position times 10000^(-2i/size)."""
    q = torch.randn(2, 5, 3, 8)
    kv = torch.randn(2, 5, 2, 3, 8)
    rotary = compat.RotaryEmbedding(8, interleaved=True)
    turned_q, turned_kv = rotary(q, kv=kv)
    angle = torch.outer(torch.arange(5.0), 10000 ** -(torch.arange(0, 8, 2) / 8))
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    for x, turned in ((q, turned_q), (kv[:, :, 0], turned_kv[:, :, 0])):
        expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2)).contiguous()) * turn)
        torch.testing.assert_close(turned, expected.flatten(-2))
    assert torch.equal(turned_kv[:, :, 1], kv[:, :, 1])
    longer, _ = rotary(torch.randn(1, 7, 3, 8), kv=torch.randn(1, 7, 2, 3, 8))
    assert longer.shape == (1, 7, 3, 8)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x = torch.randn(4, 8)
    weight = torch.randn(8)
    out = compat.layer_norm_fn(x, weight, None, eps=1e-5, is_rms_norm=True, residual=None)
    torch.testing.assert_close(out, x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight)


WATCHED = """
import torch
from perfsuite.frameworks.nanotron import compat
from perfsuite.worker.spans import events

events.watch()
compat.load(cpu=True, flash_attn=False)
from nanotron import trainer
print(hasattr(trainer.save, "is_event"), end="")
"""


@pytest.mark.launch
def test_its_finder_hides_no_import_from_others() -> None:
    """To recognise checkpoints, perfsuite has an import finder that waits for nanotron's modules."""
    assert python(WATCHED) == "True"
