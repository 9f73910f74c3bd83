"""A tokenizer and made-up texts for trl. Neither needs a network."""

from pathlib import Path
from typing import Any

WORDS = [f"w{number}" for number in range(250)]


def tokenizer() -> Any:
    """Return a tokenizer with one token for each of `WORDS`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "<pad>", "<s>", "</s>", *WORDS]
    words = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def text(at: int, count: int = 24) -> str:
    """Return a text whose words depend only on the number `at`."""
    return " ".join(WORDS[(at * 7 + word * 3) % len(WORDS)] for word in range(count))


def settings(directory: str | Path) -> dict[str, Any]:
    """Return arguments for any trainer: many steps on a CPU, with nothing saved or reported."""
    return {
        "output_dir": str(directory),
        "max_steps": 1000,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1000,
        "gradient_checkpointing": False,
    }
