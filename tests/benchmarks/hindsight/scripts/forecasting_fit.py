"""Trains a tiny temporal fusion transformer of pytorch-forecasting with Lightning's Trainer."""

import numpy
import pandas
from lightning.pytorch import Trainer, seed_everything
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

seed_everything(0)
SERIES = 20
LENGTH = 400
frame = pandas.DataFrame({
    "series": numpy.repeat([f"s{number}" for number in range(SERIES)], LENGTH),
    "time": numpy.tile(numpy.arange(LENGTH), SERIES),
    "value": numpy.random.default_rng(0).random(SERIES * LENGTH).astype("float32"),
})  # fmt: skip
data = TimeSeriesDataSet(
    frame,
    time_idx="time",
    target="value",
    group_ids=["series"],
    max_encoder_length=16,
    max_prediction_length=4,
    time_varying_unknown_reals=["value"],
)
model = TemporalFusionTransformer.from_dataset(
    data, hidden_size=8, attention_head_size=1, hidden_continuous_size=4, loss=QuantileLoss(), log_interval=-1
)
Trainer(
    accelerator="cpu",
    devices=1,
    max_steps=400,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(model, data.to_dataloader(train=True, batch_size=16, num_workers=0))
