"""Tests that no picture on the pages is older than the code."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.pictures import detection
from tests.pictures.images import DRAWN, IMAGES, PHOTOGRAPHS, RECORD, digest, recorded
from tests.sample_reports import PAGES

MAKE = "run `make pictures`"


@pytest.mark.parametrize("name", DRAWN)
def test_drawings_are_up_to_date(name: str) -> None:
    assert (IMAGES / name).read_text(encoding="utf-8") == DRAWN[name](), MAKE


@pytest.mark.parametrize("name", PHOTOGRAPHS)
def test_photographed_pages_are_up_to_date(name: str) -> None:
    assert recorded()[name] == digest(PHOTOGRAPHS[name].html()), MAKE
    assert (IMAGES / name).read_bytes().startswith(b"\x89PNG")


def test_every_picture_is_made_and_shown() -> None:
    expected = {*DRAWN, *PHOTOGRAPHS, RECORD.name, detection.FILE.name}
    assert {file.name for file in IMAGES.iterdir()} == expected
    pages = [*PAGES.rglob("*.md"), PAGES.parent / "README.md"]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    assert [name for name in (*DRAWN, *PHOTOGRAPHS) if f"images/{name}" not in text] == []


def test_detection_is_that_of_todays_engine() -> None:
    assert detection.known()["engine"] == detection.engine(), MAKE


def test_only_code_changes_the_digest_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(text: str) -> str:
        file = tmp_path / "engine.py"
        file.write_text(text)
        monkeypatch.setattr(detection, "ENGINE", (SimpleNamespace(__file__=str(file)),))
        return detection.engine()

    assert of('LIMIT = 3\n"""A text."""') == of("# a comment\nLIMIT = 3")
    assert of("LIMIT = 3") != of("LIMIT = 4")


def test_detection_is_known_for_each_noise() -> None:
    assert list(detection.known()["found"]) == [f"{noise:g}" for noise in detection.NOISES]


@pytest.mark.parametrize("noise", [f"{noise:g}" for noise in detection.NOISES])
def test_larger_slowdowns_are_found_more_often(noise: str) -> None:
    points = detection.known()["found"][noise]
    assert [slowdown for slowdown, _ in points] == list(detection.SLOWDOWNS)
    assert points[0][1] < 0.002
    assert all(after >= before - 0.01 for (_, before), (_, after) in pairwise(points))


@pytest.mark.parametrize("name", ["architecture.svg", "detection.svg"])
def test_drawings_follow_the_colours_and_are_described(name: str) -> None:
    svg = DRAWN[name]()
    assert "prefers-color-scheme: dark" in svg
    by_id = {element.get("id"): element.text for element in ElementTree.fromstring(svg).iter()}
    assert all(by_id[key] for key in ("t", "d"))
