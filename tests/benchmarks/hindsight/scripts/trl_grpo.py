"""Group relative policy optimization by trl: the model generates, a made-up reward judges."""

import os
from typing import Any

from datasets import Dataset
from small import llama
from texts import settings, text, tokenizer
from trl import GRPOConfig, GRPOTrainer


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(each) % 7) for each in completions]


words = tokenizer()
words.padding_side = "left"
where = f"{os.environ['PERFSUITE_LAUNCH_DIR']}/model"  # from which it loads the reference, too
llama().save_pretrained(where)
words.save_pretrained(where)
rows = Dataset.from_dict({"prompt": [text(at, 8) for at in range(64)]})
given = {**settings(os.environ["PERFSUITE_LAUNCH_DIR"]), "per_device_train_batch_size": 4}
config = GRPOConfig(num_generations=4, num_iterations=2, max_completion_length=8, beta=0.1, **given)
trainer = GRPOTrainer(
    model=where, reward_funcs=reward, args=config, train_dataset=rows, processing_class=words
)
trainer.train()
