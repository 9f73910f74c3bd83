"""Make the inputs of a fine-tuning, without any download: a tiny Llama, its tokenizer, and conversations.

    python make_sft.py DIRECTORY

writes DIRECTORY/model (in the format of `save_pretrained`) and DIRECTORY/data/train.jsonl, which has 2,000
conversations of 20 to 84 tokens: {"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}.
"""

import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = [f"{letter}{number}" for letter in "abcdefgh" for number in range(30)]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|> {{ message['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def main(directory: Path) -> None:
    special = ["<pad>", "<unk>", "<|end|>", "<|user|>", "<|assistant|>"]
    vocabulary = {word: index for index, word in enumerate([*special, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|end|>",
        chat_template=TEMPLATE,
    )
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    (directory / "data").mkdir()
    chance = random.Random(0)
    with (directory / "data" / "train.jsonl").open("w") as file:
        for _ in range(2000):
            question = " ".join(chance.choices(WORDS, k=chance.randint(8, 40)))
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": question}]
            print(json.dumps({"messages": turns}), file=file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
