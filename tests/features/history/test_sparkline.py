import xml.etree.ElementTree as ElementTree

import pytest

from perfsuite.features.history.sparkline import DOTS, EDGE, HEIGHT, WIDTH, Mark, drawn_range, sparkline

Element = ElementTree.Element


def drawn(values: list[float], *marks: Mark, labels: tuple[str, str] = ("low", "high")) -> Element:
    return ElementTree.fromstring(
        sparkline(values, marks, key="k", title="<speed>", description="three & more", labels=labels)
    )


def of_class(svg: Element, kind: str) -> list[Element]:
    return [element for element in svg.iter() if kind in (element.get("class") or "").split()]


def heights(line: Element) -> list[float]:
    return [float(point.split(",")[1]) for point in (line.get("points") or "").split()]


def across(line: Element) -> list[float]:
    return [float(point.split(",")[0]) for point in (line.get("points") or "").split()]


def test_a_change_is_marked_between_its_levels() -> None:
    svg = drawn([100.0] * 10 + [90.0] * 10, Mark(10, "worse", "2024-01-11, abc: -10%"))
    [mark] = of_class(svg, "change")
    before, after = of_class(svg, "level")
    assert across(before)[1] < float(mark.get("x1") or 0) < across(after)[0]
    assert heights(before)[0] < heights(after)[0]
    assert mark.findtext("title") == "2024-01-11, abc: -10%"


@pytest.mark.parametrize("sessions", [1, 2, 3, 5, 10])
def test_levels_stay_between_first_and_last_session(sessions: int) -> None:
    marks = [Mark(sessions - 1, "worse", "-10%")] if sessions > 1 else []
    svg = drawn([100.0] * sessions, *marks)
    [values] = of_class(svg, "values")
    levels = of_class(svg, "level")
    assert len(levels) == 1 + len(marks)
    assert min(across(values)) <= min(min(across(level)) for level in levels)
    assert max(max(across(level)) for level in levels) <= max(across(values))


def test_small_noise_does_not_look_large() -> None:
    [line] = of_class(drawn([100.0, 100.1] * 10), "values")
    assert max(heights(line)) - min(heights(line)) < 2
    assert drawn_range([100.0, 100.1]) == pytest.approx((98.049, 102.051))
    assert drawn_range([100.0, 150.0]) == (100.0, 150.0)


@pytest.mark.parametrize("values", [[5.0], [0.0, 0.0], [1.0, 1.0]])
def test_series_without_a_range_are_drawn(values: list[float]) -> None:
    svg = drawn(values, labels=("1", "1"))
    assert len(of_class(svg, "value")) == len(values)
    assert [element.text for element in svg.iter("text")] == ["1"]


def test_a_long_series_keeps_its_extremes() -> None:
    usual = [100.0, 101.0] * 1000
    usual[777] = 150.0
    [line] = of_class(drawn(usual), "values")
    assert len(heights(line)) <= 300
    assert min(heights(line)) == EDGE


def test_only_short_series_have_dots() -> None:
    assert len(of_class(drawn([1.0] * DOTS), "value")) == DOTS
    assert of_class(drawn([1.0] * (DOTS + 1)), "value") == []


def test_labels_of_close_values_do_not_overlap() -> None:
    low, high = (float(element.get("y") or 0) for element in drawn([100.0, 100.1]).iter("text"))
    assert low - high >= 12


def test_all_is_within_the_frame_and_described() -> None:
    svg = drawn([float(number) for number in range(200)])
    [line] = of_class(svg, "values")
    assert 0 <= min(heights(line)) <= max(heights(line)) <= HEIGHT
    assert max(across(line)) < WIDTH
    by_id = {element.get("id"): element.text for element in svg.iter()}
    assert [by_id[name] for name in (svg.get("aria-labelledby") or "").split()] == ["<speed>", "three & more"]
