from perfsuite import DDP, FSDP2, Trainer
from perfsuite.case.case import Case
from perfsuite.report.names import short_names
from tests.samples import IMAGES, make_case


def names(*cases: Case) -> list[str]:
    short = short_names({case.id: case.parameters for case in cases})
    return [short[case.id] for case in cases]


def test_a_lone_case_has_three_parts() -> None:
    assert names(make_case(framework=Trainer(fsdp="full_shard auto_wrap"))) == ["trainer · gpt2-tiny · 1x2"]


def test_alike_cases_show_what_differs() -> None:
    plain = make_case(framework=FSDP2())
    assert names(plain, plain.replace(micro_batch=4), make_case(framework=DDP())) == [
        "fsdp2 · gpt2-tiny · b2 · 1x2",
        "fsdp2 · gpt2-tiny · b4 · 1x2",
        "ddp · gpt2-tiny · 1x2",
    ]


def test_options_of_a_framework_differ_too() -> None:
    assert names(make_case(framework=Trainer(fsdp="full_shard")), make_case(framework=Trainer())) == [
        "trainer · gpt2-tiny · full_shard · 1x2",
        "trainer · gpt2-tiny · 1x2",
    ]


def test_cases_without_tokens_name_no_length() -> None:
    more = IMAGES.replace(gradient_accumulation=2)
    assert [name.split(" · ")[2:] for name in names(IMAGES, more)] == [["1x2"], ["x2", "1x2"]]


def test_a_case_that_was_never_built_keeps_its_id() -> None:
    assert short_names({"some-id": {}}) == {"some-id": "some-id"}


def test_cases_with_the_same_short_name_keep_their_ids() -> None:
    usual = {**make_case(framework=DDP()).parameters, "options": ""}
    of_framework = {**usual, "framework": "ddp-static_graph"}
    of_case = {**usual, "options": "static_graph"}
    other = {**usual, "model": "llama-tiny"}
    assert short_names({"id-1": of_framework, "id-2": of_case, "id-3": other}) == {
        "id-1": "id-1",
        "id-2": "id-2",
        "id-3": "ddp · llama-tiny · 1x2",
    }
