"""The engine as a library: the guide's example on the real model, and what its options refuse."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine_actor import offline as og
from engine_actor.errors import InvalidCall, InvalidOption, StaleView
from engine_actor.limits import EngineLimits, Numerics
from engine_actor.memory.block_pool import Capacity
from serve_app.text.tokenizer import load_tokenizer
from tests.support.doubles import SyntheticDecoder
from tests.support.engines import engine_of

GUIDE = Path(__file__).parents[3] / "engine_actor" / "README.md"


def small(**limits: Any) -> og.OfflineEngine:
    return og.OfflineEngine(
        engine_of(SyntheticDecoder(vocab=64, eos=1), num_blocks=8, block_size=4, **limits), Numerics.EXACT
    )


@pytest.mark.parity("F061", "F071")
def test_the_example_of_the_guide_runs_as_it_stands(smollm2_path: Path) -> None:
    section = GUIDE.read_text().split("## As a library")[1]
    code = re.search(r"```python\n(.*?)```", section, re.S)
    assert code is not None
    tokenizer = load_tokenizer(smollm2_path)
    names: dict[str, Any] = {
        "MODEL": str(smollm2_path),
        "initial_tokens": tokenizer.encode("The capital of France is", special_tokens=False),
        "next_turn_tokens": tokenizer.encode(" And that of Italy is", special_tokens=False),
    }
    exec(compile(code.group(1), str(GUIDE), "exec"), names)
    assert 0 < len(names["answer"]) <= 24 and names["turn_id"] == 2
    assert str(names["reason"]) in ("max_generated_tokens", "eos")


@pytest.mark.parity("F013")
def test_what_a_request_is_created_with_are_the_defaults_of_its_turns() -> None:
    engine = small()
    request = engine.create_request({"temperature": 0.5, "seed": 9, "max_generated_tokens": 3})
    first, second = og.TurnOptions(request), og.TurnOptions(request)
    second.set(temperature=0.0, max_generated_tokens=2)
    assert (first.snapshot().sampling.seed, second.snapshot().sampling.seed) == (9, 9)
    assert (first.snapshot().sampling.temperature, second.snapshot().sampling.temperature) == (0.5, 0.0)
    request.begin_turn([5, 6])
    tokens = [event.token for _ in range(9) for event in engine.run(8) if event.token is not None]
    assert len(tokens) == 3, "a turn without options has the request's"
    for given, field in ({"num_beams": 4}, "num_beams"), ({"temprature": 1.0}, "temprature"), ({"top_p": 2}, "top_p"):
        with pytest.raises(InvalidOption, match=field):
            engine.create_request(given)
    options = og.RequestOptions()
    with pytest.raises(InvalidOption, match="beam search"):
        options.set_num_beams(2)


@pytest.mark.parity("F327")
def test_whether_a_sequence_fits_is_known_before_it_is_created() -> None:
    engine = small()
    assert engine.can_serve(32) is Capacity.OK and engine.can_serve(33) is Capacity.NEVER
    request = engine.create_request()
    request.begin_turn([5] * 20)
    engine.run(8)
    assert engine.can_serve(32) is Capacity.LATER
    request.close()
    assert engine.can_serve(32) is Capacity.OK


@pytest.mark.parity("F061", "F062", "F063")
def test_events_of_a_buffer_are_borrowed_until_it_is_used_again() -> None:
    engine = small()
    request = engine.create_request()
    request.begin_turn([5, 6])
    buffer = engine.create_event_buffer(1)
    engine.run(buffer)
    event = buffer[0]
    assert event.request is request.handle and event.token is not None
    engine.run(buffer)
    with pytest.raises(StaleView, match="token"):
        _ = event.token
    with pytest.raises(InvalidCall, match="another engine"):
        small().run(buffer)


@pytest.mark.parity("F126")
def test_the_order_in_which_blocks_are_issued_can_be_chosen() -> None:
    """After blocks 1 to 3 went back, the next sequence gets the lowest again, or those that were free for longest."""
    for order, issued in (("lowest", [1, 2]), ("fifo", [4, 5])):
        decoder = SyntheticDecoder(vocab=64, eos=1)
        engine = og.OfflineEngine(
            engine_of(decoder, num_blocks=8, block_size=4, block_order=order, prefix_reuse=False), Numerics.EXACT
        )
        for length in (12, 8):
            request = engine.create_request({"max_generated_tokens": 1, "ignore_eos": True})
            request.begin_turn([5] * length)
            engine.run(8)
            request.close()
        assert decoder.steps[-1].block_table[0].tolist() == issued
    with pytest.raises(InvalidOption, match="block_order"):
        EngineLimits(block_order="random")
