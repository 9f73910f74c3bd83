"""A model in a case: the transformers configuration that it is built from. Nothing is downloaded."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, Field, JsonValue, PlainSerializer, field_validator

from perfsuite.documents import Data
from perfsuite.errors import CaseError, FileError
from perfsuite.inputs import files

V = TypeVar("V")


def _frozen(value: Mapping[str, V]) -> Mapping[str, V]:
    return MappingProxyType(dict(value))


FrozenMapping = Annotated[Mapping[str, V], AfterValidator(_frozen), PlainSerializer(dict)]


class Model(Data):
    """A causal language model: its name, and the `config.json` from which transformers builds it.

    `config` must contain `model_type`, a name that `transformers.AutoConfig` knows. The other keys depend on
    the model type. Any model that `AutoModelForCausalLM.from_config` can build can be measured.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)
    config: FrozenMapping[JsonValue]
    """The transformers configuration. It is empty for a model that only a training script can build. The
    FLOPs and the MFU of such a model are unknown."""

    def __hash__(self) -> int:
        return hash(self.name)

    @field_validator("config")
    @classmethod
    def _has_model_type(cls, config: Mapping[str, JsonValue]) -> Mapping[str, JsonValue]:
        if config and not isinstance(config.get("model_type"), str):
            raise ValueError("a transformers configuration needs model_type, for example 'llama'")
        return config

    @classmethod
    def named(cls, name: str) -> Self:
        """Return a model without a configuration, which only a training script can build."""
        return cls(name=name, config={})

    @classmethod
    def from_config(cls, config: Any, *, name: str = "") -> Self:
        """Return a model from a `config.json` (its path or content) or a transformers configuration object.

        The ids of the model's cases contain `name`. Raises `CaseError` if `name` is empty, and `FileError`
        for a file that cannot be read.
        """
        if not name:
            raise CaseError("Model.from_config needs a name for the ids of its cases: name='my-model'")
        if hasattr(config, "to_diff_dict"):
            config = {"model_type": config.model_type, **config.to_diff_dict()}
        elif not isinstance(config, Mapping):
            config = _read_json(Path(config))
        if config == {}:
            raise CaseError("Model: config: a transformers configuration needs model_type, got {}")
        return cls(name=name, config=config)

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The configuration of the language model.

        If `config` has separate parts for text and vision, this is its part `text_config`. Otherwise, this is
        the whole of `config`.
        """
        part = self.config.get("text_config")
        return part if isinstance(part, Mapping) else self.config

    @property
    def max_sequence_length(self) -> int | None:
        """The number of tokens for which the model has positions. None if the configuration has no limit."""
        lengths = (self.text_config.get(key) for key in ("max_position_embeddings", "n_positions"))
        return next((value for value in lengths if isinstance(value, int)), None)


def _read_json(path: Path) -> Any:
    try:
        # Parse loosely, like transformers, because some configurations contain NaN.
        return json.loads(files.read_text(path))
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}. Give a transformers config.json.") from error
    except (ValueError, RecursionError) as error:  # bytes that are not UTF-8 raise a ValueError
        raise FileError(f"{path}: not JSON ({error}). Give a transformers config.json.") from error
