"""The backend's classes against the installed SGLang: what it calls, derives from and hooks is what this adapter was made for."""

from __future__ import annotations

import inspect
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

with warnings.catch_warnings():  # of SGLang's own imports
    warnings.simplefilter("ignore")
    from regauge.engines.sglang import cpu

    cpu.install()
    from sglang.srt.disaggregation import decode as sglang_decode
    from sglang.srt.disaggregation import prefill as sglang_prefill
    from sglang.srt.disaggregation import utils
    from sglang.srt.disaggregation.base import conn as base
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver, CommonKVSender
    from sglang.srt.plugins.hook_registry import HookRegistry

    from regauge.engines.sglang import conn, contract, plugin, row
from regauge.engines import settings
from regauge.engines.handover import Handover, decode, encode
from regauge.engines.sglang.state import State
from regauge.errors import ConfigError, EngineError


def test_the_installed_sglang_is_one_that_this_adapter_was_made_for() -> None:
    contract.check()


@pytest.mark.parametrize("name", contract.SIGNATURES)
def test_a_signature_that_drifts_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    signatures = dict(contract.SIGNATURES) | {name: ("self", "something_else")}
    monkeypatch.setattr(contract, "SIGNATURES", signatures)
    with pytest.raises(EngineError, match=f"{name.rsplit('.', 1)[-1]} takes .*something_else"):
        contract.check()


def test_what_is_gone_and_another_version_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match=r"has no sglang\.srt\.disaggregation\.prefill\.PrefillBootstrapQueue\.gone"):
        contract.parameters("sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.gone")
    monkeypatch.setattr(contract, "SUPPORTED", ("0.5.99",))
    with pytest.raises(ConfigError, match=r"made for 0\.5\.99"):
        contract.check()


def test_states_are_sglangs() -> None:
    poll = base.KVPoll
    theirs = [poll.Failed, poll.Bootstrapping, poll.WaitingForInput, poll.Transferring, poll.Success]
    assert theirs == list(State)


@pytest.mark.parametrize(
    ("own", "theirs", "called"),
    [
        (conn.Sender, CommonKVSender, ["init", "send", "poll", "poll_pp_consensus", "failure_exception", "clear", "abort",
                                       "should_send_kv_chunk", "get_transfer_metric"]),
        (conn.Receiver, CommonKVReceiver, ["init", "send_metadata", "poll", "failure_exception", "clear", "abort",
                                           "ensure_abort_notified"]),
    ],
)  # fmt: skip
def test_methods_take_what_sglang_gives_its_own(own: type, theirs: type, called: list[str]) -> None:
    for name in called:
        ours = inspect.signature(getattr(own, name)).parameters
        wanted = inspect.signature(getattr(theirs, name)).parameters
        assert list(ours) == list(wanted)[: len(ours)]
        assert all(p.default is not p.empty for p in list(wanted.values())[len(ours) :]), name


@pytest.mark.parametrize("made", [conn.Manager, conn.Sender, conn.Receiver, conn.Bootstrap])
def test_nothing_that_sglang_demands_is_missing(made: Any) -> None:
    assert made.__abstractmethods__ == frozenset()


def attributes(source: Any, of: str) -> set[str]:
    """Names that SGLang's code takes from an object that it calls so."""
    text = inspect.getsource(source)
    return {part.split("(")[0].split(" ")[0].strip() for part in _after(text, of)}


def _after(text: str, of: str) -> list[str]:
    out = []
    for rest in text.split(of)[1:]:
        name = ""
        for letter in rest:
            if not (letter.isalnum() or letter == "_"):
                break
            name += letter
        out.append(name)
    return out


ELSEWHERE = {
    "set_kv_buffer_tensors", "deregister_buffer_to_engine", "register_buffer_to_engine",  # asked for by hasattr
    "_ensure_prefill_recompute_executor",  # for engines of several data-parallel ranks, which are refused
    "_staging_handler", "supports_host_destination",  # SGLang's staging, which only its own backends have
    "kv_mgr", "_early_send_wait_event",
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "source", "of"),
    [
        (conn.Manager, sglang_prefill, "kv_manager."), (conn.Manager, sglang_decode, "kv_manager."),
        (conn.Manager, sglang_decode, "kv_mgr."), (conn.Manager, sglang_prefill, "kv_mgr."),
        (conn.Sender, sglang_prefill, "disagg_kv_sender."), (conn.Receiver, sglang_decode, "kv_receiver."),
    ],
)  # fmt: skip
def test_everything_that_sglang_asks_of_them_is_there(own: type, source: Any, of: str) -> None:
    asked = attributes(source, of) - ELSEWHERE
    assert asked, f"SGLang asks nothing of {of}"
    given = {name for each in own.__mro__ for name in vars(each)} | set(_after(inspect.getsource(own), "self."))
    assert asked <= given


def test_the_backend_is_offered_in_every_process_and_changes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    plugin.activate()
    plugin.activate()  # SGLang may load it again
    backend = utils.TransferBackend(plugin.BACKEND)
    for hooks in HookRegistry._hooks.values():
        assert len(hooks) == 1
    stock = plugin.classes(utils.get_kv_class, utils.TransferBackend.FAKE, utils.KVClassType.SENDER)
    assert stock.__name__ == "FakeKVSender"
    for kind, made in (
        (utils.KVClassType.MANAGER, conn.Manager), (utils.KVClassType.SENDER, conn.Sender),
        (utils.KVClassType.RECEIVER, conn.Receiver), (utils.KVClassType.BOOTSTRAP_SERVER, conn.Bootstrap),
        (utils.KVClassType.KVARGS, base.KVArgs),
    ):  # fmt: skip
        assert plugin.classes(utils.get_kv_class, backend, kind) is made


def test_a_sglang_that_has_drifted_ends_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "SUPPORTED", ("0.5.99",))
    backend = SimpleNamespace(value=plugin.BACKEND)
    with pytest.raises(ConfigError, match=r"made for 0\.5\.99"):
        plugin.classes(utils.get_kv_class, backend, utils.KVClassType.MANAGER)


def test_without_settings_the_server_ends_with_the_variables_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.SGLANG, raising=False)
    manager = conn.Manager(SimpleNamespace(state_types=[]), utils.DisaggregationMode.DECODE, None)
    with pytest.raises(ConfigError, match="REGAUGE_SGLANG"):
        plugin.bound(lambda _: manager, None)


def scheduler(**other: Any) -> tuple[Any, Any]:
    parallel = {"dp_size": 1, "pp_size": 1, "attn_cp_size": 1, "attn_dcp_size": 1}
    own = {"spec_algorithm": SimpleNamespace(is_none=lambda: True), "enable_overlap": False}
    return SimpleNamespace(**own | other), SimpleNamespace(**parallel | other)


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({}, ""), ({"dp_size": 2}, "--dp-size"), ({"pp_size": 2}, "--pp-size"), ({"attn_cp_size": 2}, "context parallelism"),
        ({"spec_algorithm": SimpleNamespace(is_none=lambda: False)}, "speculative"),
        ({"enable_overlap": True}, "--disable-overlap-schedule"),
    ],
)  # fmt: skip
def test_what_is_not_carried_is_refused_at_start(
    other: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disagg = SimpleNamespace(disaggregation_decode_allocation_policy="early", optimistic_prefill_attempts=0)
    monkeypatch.setattr(conn, "get_disagg", lambda: disagg)
    if not why:
        conn._refuse(*scheduler())
        return
    with pytest.raises(ConfigError, match=why):
        conn._refuse(*scheduler(**other))


counts = st.integers(0, 1 << 20)
tops = st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(-50, 0, width=32)), max_size=20)


@given(
    token=st.integers(0, 1 << 20), logprob=st.floats(-50, 0, width=32), top=tops, cached=st.tuples(counts, counts, counts),
    room=st.integers(1, (1 << 63) - 1), rows=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)  # fmt: skip
def test_a_row_of_prefill_becomes_the_same_row_of_decode(
    token: int, logprob: float, top: list[tuple[int, float]], cached: tuple[int, int, int], room: int, rows: tuple[int, int]
) -> None:  # fmt: skip
    sent, taken = (utils.MetadataBuffers(4, 8, torch.float32, 1) for _ in range(2))
    request = SimpleNamespace(
        metadata_buffer_index=rows[0], output_ids=[token], cached_tokens=sum(cached), cached_tokens_device=cached[0],
        cached_tokens_host=cached[1], cached_tokens_storage=cached[2], get_mm_token_counts=lambda: (0, 0, 0),
        return_logprob=True, return_sampling_mask=False, hidden_states_tensor=None, bootstrap_room=room,
        logprob=SimpleNamespace(
            output_token_logprobs_val=[logprob], output_token_logprobs_idx=[token],
            output_top_logprobs_val=[[v for _, v in top]], output_top_logprobs_idx=[[i for i, _ in top]],
        ),
    )  # fmt: skip
    sent.set_buf(request)
    given = row.read(sent, rows[0], len(top))
    assert given == Handover(token, logprob=logprob, top=top, cached=cached)
    row.write(taken, rows[1], decode(encode(given), "p.0"), room)
    for name in row.TENSORS:
        assert torch.equal(getattr(sent, name)[rows[0]], getattr(taken, name)[rows[1]]), name


def test_a_row_that_was_anothers_before_keeps_nothing_of_it() -> None:
    buffers = utils.MetadataBuffers(1, 8, torch.float32, 1)
    row.write(buffers, 0, Handover(1, logprob=-1.0, top=[(5, -1.0), (6, -2.0)], cached=(1, 2, 3)), 7)
    row.write(buffers, 0, Handover(2), 8)
    fresh = utils.MetadataBuffers(1, 8, torch.float32, 1)
    row.write(fresh, 0, Handover(2), 8)
    for name in row.TENSORS:
        torch.testing.assert_close(
            getattr(buffers, name), getattr(fresh, name), rtol=0, atol=0, equal_nan=True, msg=name
        )
    assert torch.isnan(buffers.output_token_logprobs_val[0][0]), (
        "prefill did not say it: the gateway has it from elsewhere"
    )


def test_more_alternatives_than_a_row_holds_are_refused() -> None:
    buffers = utils.MetadataBuffers(1, 8, torch.float32, 1, max_top_logprobs_num=4)
    with pytest.raises(EngineError, match="5 alternatives"):
        row.write(buffers, 0, Handover(1, top=[(i, -1.0) for i in range(5)]), 7)
    assert int(buffers.bootstrap_room[0][0]) == 0
