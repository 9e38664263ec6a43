"""The scheduler on a tiny random model: what runs when, what ends how, and that company changes nothing."""

import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
import torch

from regauge.engines.local.model import LocalModel
from regauge.engines.local.sampling import SamplingParams
from regauge.engines.local.scheduler import NO_TOKEN, Output, Request, Scheduler, pages_needed
from regauge.errors import EngineError

from .conftest import CONFIG, GREEDY, PAGE, PlainStore, Rig, prompt


@pytest.fixture
def rig(tiny: LocalModel) -> Rig:
    return Rig(tiny)


def alone(model: LocalModel, tokens: tuple[int, ...], sampling: SamplingParams = GREEDY) -> list[int]:
    rig = Rig(model)
    rig.add("alone", tokens, sampling)
    return rig.finish()["alone"]


def test_one_request_runs_to_its_length(rig: Rig) -> None:
    rig.add("a", prompt(10))
    assert len(rig.finish()["a"]) == 8
    assert rig.ends() == {"a": "length"}
    assert len(rig.steps) == 8
    assert rig.scheduler.step() == []


def test_company_does_not_change_the_tokens(tiny: LocalModel, rig: Rig) -> None:
    prompts = {f"r{n}": prompt(length, n) for n, length in enumerate([1, 5, 31, 32, 33, 70, 100, 16])}
    for name, tokens in prompts.items():
        rig.add(name, tokens)
    assert rig.finish() == {name: alone(tiny, tokens) for name, tokens in prompts.items()}


def test_seeded_sampling_does_not_depend_on_company_either(tiny: LocalModel, rig: Rig) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.2, top_p=0.95, seed=4, ignore_eos=True)
    for n in range(6):
        rig.add(f"r{n}", prompt(20 + n, n), sampling)
    tokens = rig.finish()
    assert tokens == {f"r{n}": alone(tiny, prompt(20 + n, n), sampling) for n in range(6)}
    assert len({tuple(t) for t in tokens.values()}) > 1


def chunks_of(rig: Rig) -> dict[str, list[tuple[int, int]]]:
    """Run to the end; return (start, count) of each request's prompt chunks as layer 0 reports them."""
    seen: dict[str, list[tuple[int, int]]] = {}

    def on_layer(name: str, layer: int, start: int, count: int) -> None:
        if layer == 0:
            seen.setdefault(name, []).append((start, count))

    while rig.scheduler.has_work:
        rig.scheduler.step(on_layer)
    return seen


def test_chunks_are_cut_alike_alone_and_in_company(tiny: LocalModel, rig: Rig) -> None:
    lengths = {"a": 70, "b": 10, "c": 33, "d": 64, "e": 1}
    for name, length in lengths.items():
        rig.add(name, prompt(length))
    together = chunks_of(rig)
    assert together["a"] == [(0, 32), (32, 32), (64, 6)]
    assert together["e"] == [(0, 1)]  # a prompt of one token is a prefill, too
    for name, length in lengths.items():
        single = Rig(tiny)
        single.add(name, prompt(length))
        assert chunks_of(single) == {name: together[name]}


def test_on_layer_reports_every_layer_of_prompt_chunks_only(tiny: LocalModel, rig: Rig) -> None:
    rig.add("decodes", prompt(5))
    rig.step()
    rig.add("a", prompt(40))
    seen: list[tuple[str, int, int, int]] = []
    for _ in range(4):
        rig.scheduler.step(lambda *call: seen.append(call))
    assert seen == [("a", layer, start, n) for start, n in ((0, 32), (32, 8)) for layer in range(tiny.num_layers)]


def test_reported_tokens_are_in_the_store_when_they_are_reported(rig: Rig) -> None:
    request = rig.add("a", prompt(40))
    slots = rig.store.places(request.pages, 40)
    rig.store.k.fill_(0)

    def on_layer(name: str, layer: int, start: int, count: int) -> None:
        written = rig.store.k[:, slots].abs().sum(dim=(2, 3)) > 0
        assert written[: layer + 1, : start + count].all()
        assert not written[layer + 1 :, start:].any()

    rig.scheduler.step(on_layer)
    rig.scheduler.step(on_layer)
    assert rig.scheduler.decoding == 1


def test_several_short_prompts_share_a_step(rig: Rig) -> None:
    for n in range(5):
        rig.add(f"r{n}", prompt(10))
    assert rig.step() == ["r0", "r1", "r2"]  # 30 of 32 tokens; a fourth prompt does not fit whole
    assert rig.step() == ["r0", "r1", "r2", "r3", "r4"]


def test_a_long_prompt_does_not_starve_decodes(rig: Rig) -> None:
    rig.add("decodes", prompt(4), msgspec.structs.replace(GREEDY, max_tokens=20))
    rig.step()
    rig.add("long", prompt(160))
    assert rig.scheduler.waiting_tokens == 160
    assert [rig.step() for _ in range(4)] == [["decodes"]] * 4
    assert rig.step() == ["decodes", "long"]
    assert (rig.scheduler.waiting_tokens, rig.scheduler.decoding) == (0, 2)


def test_more_decodes_than_a_batch_holds_take_turns(rig: Rig) -> None:
    for n in range(6):
        rig.add(f"r{n}", prompt(5, n), msgspec.structs.replace(GREEDY, max_tokens=30))
    while rig.scheduler.waiting_tokens:
        rig.step()
    rounds = [rig.step() for _ in range(6)]
    assert all(len(names) == 4 for names in rounds)
    counts = [sum(f"r{n}" in names for names in rounds) for n in range(6)]
    assert counts == [4] * 6  # 6 steps of 4 are 4 for each of 6
    assert all(len({*one, *next_}) == 6 for one, next_ in itertools.pairwise(rounds))


def test_earlier_arrivals_are_prefilled_first(rig: Rig) -> None:
    rig.add("late", prompt(20), arrived=9.0)
    rig.add("early", prompt(20), arrived=3.0)
    rig.add("early too", prompt(20), arrived=3.0)
    assert [rig.step()[-1] for _ in range(3)] == ["early", "early too", "late"]


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_abort_in_every_phase(tiny: LocalModel, rig: Rig, after: int) -> None:
    """A 70-token prompt is waiting at step 0, in its chunks at 1 and 2, decodes from 3 on."""
    rig.add("gone", prompt(70))
    rig.add("stays", prompt(20, 1))
    for _ in range(after):
        rig.step()
    assert rig.scheduler.abort("gone")
    assert not rig.scheduler.abort("gone")
    before = len(rig.steps)
    assert rig.finish()["stays"] == alone(tiny, prompt(20, 1))
    assert all(o.request_id != "gone" for step in rig.steps[before:] for o in step)
    rig.add("gone", prompt(70))  # its id is free again
    assert rig.scheduler.abort("gone")
    assert not rig.scheduler.has_work


def test_abort_from_on_layer(tiny: LocalModel, rig: Rig) -> None:
    rig.add("gone", prompt(12))
    rig.add("stays", prompt(12, 1))
    calls: list[str] = []

    def on_layer(name: str, layer: int, start: int, count: int) -> None:
        calls.append(name)
        if name == "gone":
            assert rig.scheduler.abort("gone")

    assert [output.request_id for output in rig.scheduler.step(on_layer)] == ["stays"]
    assert calls.count("gone") == 1
    assert calls.count("stays") == tiny.num_layers


def test_a_prefilled_request_decodes_elsewhere_as_if_it_had_stayed(tiny: LocalModel) -> None:
    """Prefill here, hand the pool over, decode there: the control for every transfer."""
    sampling = SamplingParams(max_tokens=10, temperature=0.9, seed=None, frequency_penalty=0.5, ignore_eos=True)
    prefill = Rig(tiny)
    request = prefill.add("a", prompt(50), sampling, prefill_only=True)
    first = [o for _ in range(2) for o in prefill.scheduler.step()]
    assert [(o.index, o.finish_reason) for o in first] == [(0, "prefill")]
    assert not prefill.scheduler.has_work

    decode = Scheduler(tiny, prefill.store, CONFIG)
    seeded = msgspec.structs.replace(sampling, seed=first[0].seed)
    decode.add(Request("a", request.token_ids, seeded, request.pages, computed=50, generated=(first[0].token,)))
    outputs = []
    while decode.has_work:
        outputs += decode.step(lambda *call: pytest.fail(f"nothing is prefilled here: {call}"))
    assert [o.index for o in outputs] == list(range(1, 10))
    assert [first[0].token, *(o.token for o in outputs)] == alone(tiny, prompt(50), seeded)


def test_a_lost_request_is_resumed_from_its_tokens(tiny: LocalModel, rig: Rig) -> None:
    sampling = SamplingParams(max_tokens=10, temperature=0.9, seed=3, ignore_eos=True)
    whole = alone(tiny, prompt(50), sampling)
    rig.add("a", prompt(50), sampling, generated=tuple(whole[:4]))
    outputs: list[Output] = []
    while rig.scheduler.has_work:
        outputs += rig.scheduler.step()
    assert [o.index for o in outputs] == list(range(4, 10))
    assert [o.token for o in outputs] == whole[4:]


def test_a_cached_prefix_is_not_computed_again(tiny: LocalModel, rig: Rig) -> None:
    first = rig.add("first", prompt(50))
    rig.finish()
    calls: list[tuple[str, int, int, int]] = []
    rig.scheduler.add(Request("again", first.token_ids, GREEDY, first.pages, computed=48))
    outputs = rig.scheduler.step(lambda *call: calls.append(call))
    assert calls == [("again", layer, 48, 2) for layer in range(tiny.num_layers)]
    assert outputs[0].token == alone(tiny, prompt(50))[0]


class TestStopping:
    def test_at_the_models_end_of_sequence(self, tiny: LocalModel, rig: Rig) -> None:
        """The token that the model likes best after the prompt is declared its end of sequence."""
        token = alone(tiny, prompt(10))[2]
        tiny_eos, tiny.eos_ids = tiny.eos_ids, frozenset({token})
        try:
            rig.add("stops", prompt(10), SamplingParams(max_tokens=8, temperature=0))
            rig.add("goes on", prompt(10), GREEDY)
            tokens = rig.finish()
        finally:
            tiny.eos_ids = tiny_eos
        assert tokens["goes on"][: len(tokens["stops"])] == tokens["stops"]
        assert tokens["stops"].index(token) == len(tokens["stops"]) - 1
        assert rig.ends() == {"stops": "stop", "goes on": "length"}

    def test_at_a_stop_token_even_with_ignore_eos(self, tiny: LocalModel, rig: Rig) -> None:
        token = alone(tiny, prompt(10))[1]
        rig.add("a", prompt(10), msgspec.structs.replace(GREEDY, stop_token_ids=(token,)))
        assert rig.finish()["a"][-1] == token
        assert rig.ends() == {"a": "stop"}

    def test_not_before_min_tokens(self, tiny: LocalModel, rig: Rig) -> None:
        free = alone(tiny, prompt(10))
        place = max(free.index(token) for token in free)  # the last token that appears for the first time
        assert place > 0
        stop = msgspec.structs.replace(GREEDY, stop_token_ids=(free[place],))
        rig.add("allowed", prompt(10), msgspec.structs.replace(stop, min_tokens=place))
        rig.add("banned", prompt(10), msgspec.structs.replace(stop, min_tokens=place + 1))
        tokens = rig.finish()
        assert tokens["allowed"] == free[: place + 1]
        assert tokens["banned"][:place] == free[:place]
        assert tokens["banned"][place] != free[place]

    def test_at_the_context_limit(self, rig: Rig) -> None:
        rig.add("a", prompt(196), msgspec.structs.replace(GREEDY, max_tokens=100))
        assert len(rig.finish()["a"]) == 200 - 196
        assert rig.ends() == {"a": "length"}

    @pytest.mark.parametrize(("change", "reason"), [({"max_tokens": 1}, "length"), ({}, "prefill")])
    def test_prefill_only_says_when_nothing_is_left_to_decode(
        self, rig: Rig, change: dict[str, int], reason: str
    ) -> None:
        rig.add("a", prompt(9), msgspec.structs.replace(GREEDY, **change), prefill_only=True)
        assert rig.step() == ["a"]
        assert rig.ends() == {"a": reason}


def test_logprobs_come_with_every_token(rig: Rig) -> None:
    rig.add("a", prompt(9), msgspec.structs.replace(GREEDY, logprobs=2))
    rig.finish()
    for (output,) in rig.steps:
        assert output.top is not None
        assert output.top[0] == (output.token, output.logprob)
        assert output.top[1][1] <= output.top[0][1] < 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": ()}, "prompt is empty"),
        ({"token_ids": (5, 300)}, "token id 300 is outside the vocabulary of 300"),
        ({"token_ids": (5, -1)}, "token id -1"),
        ({"token_ids": (5, "x")}, "must be integers"),
        ({"generated": (400,)}, "token id 400"),
        ({"token_ids": prompt(200)}, "200 tokens leave no room for an answer in a context of 200"),
        ({"pages": np.arange(1)}, "has 1 pages, but its tokens take 2"),
        ({"computed": 10}, "computed=10 is outside 0 to 9"),
        ({"computed": -1}, "computed=-1"),
        ({"generated": tuple(range(3, 11))}, "all 8 tokens of its answer are generated"),
        ({"id": "taken"}, "already running"),
    ],
)
def test_wrong_requests_are_refused_by_name(rig: Rig, change: dict[str, object], message: str) -> None:
    rig.add("taken", prompt(3))
    good = {"id": "a", "token_ids": prompt(10), "sampling": GREEDY, "pages": np.arange(2)}
    with pytest.raises(EngineError, match=message) as raised:
        rig.scheduler.add(Request(**(good | change)))
    assert str((good | change)["id"]) in str(raised.value)
    assert list(rig.finish()) == ["taken"]


@pytest.mark.parametrize("prefill_only", [False, True])
@pytest.mark.parametrize("length", [1, 8, 9, 25, 32, 33])
def test_pages_needed_is_exactly_what_is_written(rig: Rig, length: int, prefill_only: bool) -> None:
    needed = pages_needed(length, GREEDY, PAGE, prefill_only=prefill_only)
    request = Request("a", prompt(length), GREEDY, np.arange(needed), prefill_only=prefill_only)
    with pytest.raises(EngineError, match="page table"):
        rig.scheduler.add(dataclasses.replace(request, pages=np.arange(needed - 1)))
    rig.scheduler.add(request)
    rig.store.k.fill_(0)
    rig.finish()
    written = int((rig.store.k[0].abs().sum(dim=(1, 2)) > 0).sum())
    assert written == (length if prefill_only else length + 7)
    assert -(-written // PAGE) == needed


class FailingStore(PlainStore):
    """A store whose memory goes away when told to."""

    broken = False

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.broken and layer == 1:
            raise RuntimeError("the pool's memory is gone")
        super().write(layer, k, v)


def test_a_failing_step_fails_its_requests_and_no_others(tiny: LocalModel) -> None:
    store = FailingStore(tiny, 96)
    rig = Rig(tiny, store=store)
    rig.add("decodes", prompt(5))
    rig.step()
    rig.add("prefills", prompt(32))
    rig.add("waits", prompt(32, 1))
    store.broken = True
    failed = rig.scheduler.step()
    assert [o.request_id for o in failed] == ["decodes", "prefills"]
    for output in failed:
        assert (output.token, output.finish_reason) == (NO_TOKEN, "error")
        assert output.request_id in str(output.error)
        assert "the pool's memory is gone" in str(output.error)
    store.broken = False
    rig.steps.clear()
    assert rig.finish() == {"waits": alone(tiny, prompt(32, 1))}


def test_a_request_with_damaged_kv_fails_alone(tiny: LocalModel, rig: Rig) -> None:
    damaged = rig.add("damaged", prompt(20))
    rig.add("sound", prompt(5, 1))
    rig.step()
    rig.store.v[:, rig.store.places(damaged.pages, 1)] = torch.nan
    outputs = rig.scheduler.step()
    assert {o.request_id: o.finish_reason for o in outputs} == {"damaged": "error", "sound": None}
    assert "not finite" in str(outputs[0].error)
    rig.steps.append(outputs[1:])
    assert rig.finish()["sound"] == alone(tiny, prompt(5, 1))


def test_an_error_in_on_layer_ends_the_step(rig: Rig) -> None:
    rig.add("a", prompt(5))

    def on_layer(*_call: object) -> None:
        raise ConnectionError("peer lost")

    (output,) = rig.scheduler.step(on_layer)
    assert output.finish_reason == "error"
    assert isinstance(output.error, EngineError)
    assert isinstance(output.error.__cause__, ConnectionError)
    assert not rig.scheduler.has_work


@pytest.mark.parametrize("computed", [0, 32, 41])
def test_an_answer_that_is_gone_on_with_is_prefilled_with_its_tokens(tiny: LocalModel, rig: Rig, computed: int) -> None:
    """Also where all but its last token is there: that one's KV is part of what is delivered."""
    whole = alone(tiny, prompt(38))
    rig.add("before", (*prompt(38), *whole[:3]), prefill_only=True)
    rig.finish()
    marks: list[tuple[int, int, int]] = []
    pages = rig.pages.take(64)
    if computed:  # the same pages hold the beginning
        pages = rig.add("beginning", (*prompt(38), *whole[:4])[: computed + 1], prefill_only=True).pages
        rig.finish()
        pages = np.concatenate([pages, rig.pages.take(64)])
    rig.scheduler.add(
        Request("r", prompt(38), GREEDY, pages, computed=computed, generated=tuple(whole[:4]), prefill_only=True)
    )
    assert rig.scheduler.work.decoding == 0
    outputs = []
    while rig.scheduler.has_work:
        outputs += rig.scheduler.step(lambda _, layer, start, count: marks.append((layer, start, count)))
    [output] = outputs
    assert (output.token, output.index, output.finish_reason) == (whole[4], 4, "prefill")
    assert sum(count for layer, _, count in marks if layer == 0) == 42 - computed
    assert rig.scheduler.work.decoded == 0
