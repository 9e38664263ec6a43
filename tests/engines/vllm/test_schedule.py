"""The scheduler's half of vLLM's connector: what vLLM decides in, commands for the workers out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from regauge.engines.vllm.schedule import (
    Blocks,
    Computed,
    Drop,
    Expect,
    Fail,
    Finish,
    Offer,
    ReceiveParams,
    Schedule,
    SendParams,
    Step,
)

TO = {"regauge": {"transfer": "t", "to": {"d.0": ["10.0.0.2", 9000]}, "handover": True}}
FROM = {"regauge": {"transfer": "t", "from": ["p.0", "p.1"]}}


def schedule(**given: Any) -> Schedule:
    return Schedule(**{"block_size": 16, "sends": True, "receives": True, **given})


def test_a_prompt_in_chunks_is_offered_once_and_told_step_by_step() -> None:
    s = schedule()
    s.arrived("r", TO, 40)
    assert s.external("r", 40, 0) == 0
    params = SendParams("t", {"d.0": ("10.0.0.2", 9000)}, handover=True)
    assert s.step([Step("r", ([1, 2],), 0, 32)], [], ()) == [
        Offer("r", params, 40), Blocks("r", ([1, 2],)), Computed("r", (0, 32)),
    ]  # fmt: skip
    assert s.step([], [Step("r", ([5],), 32, 8)], ()) == [Blocks("r", ([1, 2, 5],)), Computed("r", (32, 40))]
    assert s.finished("r", normal=True, token=7)
    assert s.waiting
    assert s.step([], [], ()) == [Finish("r", 7)]
    assert not s.waiting


def test_a_cached_prefix_is_there_before_the_step() -> None:
    s = schedule()
    s.arrived("r", TO, 40)
    told = s.step([Step("r", ([1, 2, 3],), 32, 8)], [], ())
    assert told[2:] == [Computed("r", (0, 32), cached=True), Computed("r", (32, 40))]


def test_tokens_beyond_the_prompt_are_nobodys() -> None:
    s = schedule()
    s.arrived("r", TO, 20)
    s.step([Step("r", ([1, 2],), 0, 20)], [], ())
    assert s.step([], [Step("r", None, 20, 1)], ()) == []


def test_the_first_token_is_told_only_where_it_is_wanted() -> None:
    s = schedule()
    s.arrived("r", {"regauge": {"transfer": "t", "to": {"d.0": ["10.0.0.2", 9000]}}}, 4)
    s.step([Step("r", ([1],), 0, 4)], [], ())
    s.finished("r", normal=True, token=7)
    assert s.step([], [], ()) == [Finish("r", None)]


@pytest.mark.parametrize(("computed", "normal"), [(20, False), (32, False), (32, True)])
def test_a_request_that_ends_before_its_prompt_is_computed_gives_its_transfer_up(computed: int, normal: bool) -> None:
    s = schedule()
    s.arrived("r", TO, 40)
    s.step([Step("r", ([1, 2, 3],), 0, computed)], [], ())
    assert s.finished("r", normal=normal, token=None)  # its blocks stay until the workers report
    assert s.step([], [], ()) == [Drop("r", "the request was aborted", report=True)]


def test_a_request_that_was_never_scheduled_leaves_nothing() -> None:
    s = schedule()
    s.arrived("r", TO, 40)
    assert not s.finished("r", normal=False, token=None)
    assert s.step([], [], ()) == []


def test_a_preempted_request_gives_its_transfer_up_and_keeps_no_blocks() -> None:
    s = schedule()
    s.arrived("r", TO, 40)
    s.step([Step("r", ([1, 2],), 0, 32)], [], ())
    assert s.step([], [], ["r", "other"]) == [Drop("r", "the request was preempted on the prefill side", report=False)]
    assert s.step([], [Step("r", ([3, 4, 5],), 0, 40)], ()) == []  # resumed: local from now on
    assert not s.finished("r", normal=True, token=3)


def test_what_no_prefix_covers_is_loaded_once() -> None:
    s = schedule()
    s.arrived("r", FROM, 40)
    assert s.external("r", 40, 16) == 24
    assert s.external("r", 40, 16) == 24  # vLLM asks again where it cannot allocate
    s.allocated("r", 40, ([9, 1, 2],), 24)
    assert s.step([], [], ()) == [Expect("r", ReceiveParams("t", ["p.0", "p.1"]), 40, 16, ([9, 1, 2],))]
    s.loaded(["r"])
    assert s.external("r", 40, 16) == 0  # it failed: recompute, and ask nobody again
    assert not s.finished("r", normal=True, token=1)
    assert s.step([], [], ()) == []


@pytest.mark.parametrize(
    ("prompt", "computed", "external"), [(40, 32, 0), (33, 32, 0), (32, 16, 0), (32, 0, 32), (1, 0, 1), (16, 0, 16)]
)
def test_a_prefix_of_all_whole_blocks_is_enough(prompt: int, computed: int, external: int) -> None:
    s = schedule()
    s.arrived("r", FROM, prompt)
    assert s.external("r", prompt, computed) == external
    s.allocated("r", prompt, ([1, 2, 3],), external)
    [expect] = s.step([], [], ())
    assert isinstance(expect, Expect)
    assert (expect.first, expect.report) == (prompt - external, external > 0)


def test_an_abort_while_loading_is_reported_by_the_workers() -> None:
    s = schedule()
    s.arrived("r", FROM, 40)
    s.allocated("r", 40, ([1, 2, 3],), 40)
    s.step([], [], ())
    assert not s.finished("r", normal=False, token=None)  # vLLM keeps the blocks by itself
    assert s.step([], [], ()) == [Drop("r", "the request was aborted", report=True)]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"transfer": "t", "to": {"d.0": ["10.0.0.2", 0]}}, r"`int` >= 1 - at `\$.to"),
        ({"transfer": "t", "to": {"d.0": ["10.0.0.2", 9000]}, "more": 1}, "unknown field `more`"),
        ({"to": {"d.0": ["10.0.0.2", 9000]}}, "missing required field `transfer`"),
        ({"transfer": "t", "to": {}}, r"length >= 1 - at `\$.to"),
        ({"transfer": "t", "from": []}, "length >= 1"),
        ({"transfer": "t"}, "missing required field `from`"),
        ("t", "Expected `object`"),
    ],
)
def test_wrong_parameters_are_one_requests_error(given: Any, complaint: str) -> None:
    s = schedule()
    s.arrived("r", {"regauge": given}, 40)
    if isinstance(given, dict) and "to" in given:
        s.step([Step("r", ([1, 2, 3],), 0, 40)], [], ())
        assert not s.finished("r", normal=True, token=1)
        why = s.refused("r")
        assert s.refused("r") == ""
    else:
        assert s.external("r", 40, 0) == 40
        s.allocated("r", 40, ([1, 2, 3],), 40)
        [fail] = s.step([], [], ())
        assert isinstance(fail, Fail)
        why = fail.reason
    assert why.startswith("kv_transfer_params.regauge: ")
    assert re.search(complaint, why)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_of_the_other_role_says_so(role: str) -> None:
    s = schedule(sends=role != "prefill", receives=role != "decode")
    s.arrived("r", TO if role == "prefill" else FROM, 40)
    if role == "prefill":
        why = s.refused("r")
    else:
        s.allocated("r", 40, ([1],), s.external("r", 40, 0))
        [fail] = s.step([], [], ())
        assert isinstance(fail, Fail)
        why = fail.reason
    assert f"asks this engine to {role}, which its kv_role does not" in why


def test_requests_of_others_are_left_alone() -> None:
    s = schedule()
    s.arrived("r", None, 40)
    s.arrived("q", {"do_remote_decode": True}, 40)
    for name in "rq":
        assert s.external(name, 40, 0) == 0
        s.allocated(name, 40, ([1],), 0)
        assert s.step([Step(name, ([1],), 0, 40)], [], ()) == []
        assert not s.finished(name, normal=True, token=1)
        assert s.refused(name) == ""
