from pathlib import Path
from typing import ClassVar

import pytest

from perfsuite.errors import FileError
from perfsuite.frameworks.common.config_file import ConfigFile


class Mine(ConfigFile):
    kind: ClassVar[str] = "a file of mine"


def test_the_digest_is_of_the_content() -> None:
    one, same, other = (Mine(text=text) for text in ("a: 1\nb: [2]", "# mine\nb: [2]\na: 1", "a: 1\nb: [3]"))
    assert one.content == {"a": 1, "b": [2]}
    assert one.digest == same.digest != other.digest


def test_keeps_the_text_with_the_case(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("a: 1  # one\n")
    config = Mine(text=Mine.read_text(file))
    assert config.text == "a: 1  # one\n"
    assert Mine.model_validate_json(config.model_dump_json()) == config
    assert "one" not in repr(config)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read {file}: No such file or directory. Give a file of mine."),
        (b"\xff\xfe\x00", "cannot read {file}: 'utf-8' codec can't decode byte 0xff"),
        (b"a: [1", "{file}: not YAML (while parsing a flow sequence"),
    ],
)
def test_unreadable_file_says_what_to_give(tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "mine.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(FileError) as caught:
        Mine.read_text(file)
    assert str(caught.value).startswith(said.format(file=file))
    assert str(caught.value).endswith("Give a file of mine.")


@pytest.mark.parametrize("content", ["a: 1\ncomet:\n  api_key: hidden\n", "a: 1\nb:\n  c: hf_" + "a1" * 15])
def test_refuses_a_secret_without_repeating_it(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(FileError, match="line 3 looks like a secret") as raised:
        Mine.read_text(file)
    assert content[-6:] not in str(raised.value)
