"""Shorten the ids of cases for pages that show many of them. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from perfsuite.case.case import NO_TOKENS

SEPARATOR = " · "


def short_names(parameters: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Return short names: framework, model, the parts of the id that distinguish cases, and topology.

    `parameters` has the `Case.parameters` of each case, by case id. Cases without parameters, and cases whose
    short names would be the same, keep their ids.
    """
    names = {case_id: case_id for case_id in parameters}
    alike = defaultdict[tuple[str, str, str], list[str]](list)
    for case_id, of_case in parameters.items():
        if of_case:
            alike[_framework(of_case), of_case["model"], of_case["topology"]].append(case_id)
    for (framework, model, topology), case_ids in alike.items():
        parts = {case_id: _parts(parameters[case_id]) for case_id in case_ids}
        distinguishing = _differing(list(parts.values()))
        for case_id, texts in parts.items():
            shown = [texts[number] for number in distinguishing if texts[number]]
            names[case_id] = SEPARATOR.join([framework, model, *shown, topology])
    uses = Counter(names.values())
    return {case_id: name if uses[name] == 1 else case_id for case_id, name in names.items()}


def _framework(parameters: Mapping[str, str]) -> str:
    return parameters["framework"].partition("-")[0]


def _parts(parameters: Mapping[str, str]) -> list[str]:
    """Return the parts that an id has in addition to framework, model and topology."""
    length = parameters["sequence_length"]
    accumulation = parameters["gradient_accumulation"]
    return [
        parameters["framework"].partition("-")[2],
        "" if length == NO_TOKENS else f"s{length}",
        f"b{parameters['micro_batch']}",
        "" if accumulation == "1" else f"x{accumulation}",
        parameters["precision"],
        parameters["options"],
    ]


def _differing(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the columns that are not the same in all rows."""
    return [number for number, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]
