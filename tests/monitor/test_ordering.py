"""One order of layers out of several."""

from attemper.monitor.ordering import merged


def names(*orders: str) -> list[str]:
    return [name for name, _ in merged([[(name, 0) for name in order.split()] for order in orders])]


def test_what_all_know_keeps_its_order() -> None:
    assert names("b.1 a.1 b.0", "b.1 a.1 b.0") == ["b.1", "a.1", "b.0"]
    assert names("a.0 c.0 a.1", "c.0 b.0 a.1") == ["a.0", "c.0", "b.0", "a.1"]


def test_interleaved_stages_follow_their_numbers() -> None:
    assert names("l.0 l.1 l.4 l.10", "l.2 l.3 l.6 l.11") == [f"l.{number}" for number in (0, 1, 2, 3, 4, 6, 10, 11)]


def test_kinds_of_layers_follow_the_ranks() -> None:
    assert names("encoder.0 encoder.1", "decoder.0 decoder.1") == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert names("encoder.0 decoder.0", "encoder.1 decoder.1") == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_calls_follow_one_another() -> None:
    assert merged([[("a", 1)], [("a", 0)]]) == [("a", 0), ("a", 1)]


def test_orders_that_contradict_one_another_give_each_layer_once() -> None:
    assert sorted(names("a b c", "c b a")) == ["a", "b", "c"]
    assert names() == names("", "") == []
