"""The classes of the transfer backend `regauge`, as SGLang 0.5.23 asks for them. Thin: `sending.py` and `receiving.py` know what to do.

They derive from SGLang's bare interface, not from its common backend, which listens for unauthenticated messages at an open port. Methods are
for the scheduler's thread and never wait.
"""

# ruff: noqa: ARG002  # SGLang calls these methods with all they may have

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NoReturn

import structlog
from sglang.srt.disaggregation.base.conn import (
    BaseKVBootstrapServer,
    BaseKVManager,
    BaseKVReceiver,
    BaseKVSender,
    KVTransferMetric,
    StateType,
)
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_disagg, get_parallel

from regauge.engines import handover, settings
from regauge.engines.bridge import START_S, Bridge
from regauge.engines.ends import Ends, open_ends
from regauge.engines.sglang import pools, row
from regauge.engines.sglang.callers import Callers
from regauge.engines.sglang.receiving import DecodeRank, Receiving
from regauge.engines.sglang.rooms import RoomsDoor
from regauge.engines.sglang.sending import PrefillRank, Sending
from regauge.engines.sglang.state import State
from regauge.errors import ConfigError, EngineError, RegaugeError
from regauge.layout.models import model_from_config
from regauge.layout.spec import Layout
from regauge.move.outbound import Address

log = structlog.get_logger()

ENGINE: Final = "sglang"


class _OnePrefill:
    """What SGLang asks about a prefill engine before it makes a receiver; the links find out the rest."""

    dp_size = 1
    follow_bootstrap_room = True
    decode_allocation_policy = "early"


class _EveryPrefill(dict[str, _OnePrefill]):
    """Every address may be one: SGLang would else ask it while its scheduler waits."""

    def get(self, key: str, default: Any = None) -> _OnePrefill:
        """Return the same for all."""
        del key, default
        return _OnePrefill()


class Manager(BaseKVManager):  # type: ignore[misc]  # SGLang has no types here
    """The transfers of one scheduler, once `bind_regauge` has given it the pools."""

    supports_deferred_decode_kv_release = True
    is_dummy_cp_rank = False
    enable_all_cp_ranks_for_transfer = False

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        self.kv_args = args
        self.server_args = server_args
        self.prefills = disaggregation_mode == DisaggregationMode.PREFILL
        self.prefill_info_table = _EveryPrefill()
        self.req_to_decode_prefix_len: dict[int, int] = {}
        self.transfer_infos: dict[int, Any] = {}
        self.enable_deferred_decode_kv_release = (
            not self.prefills and envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get()
        )
        self.prefill: PrefillRank
        self.decode: DecodeRank
        self.windowed: frozenset[int] = frozenset()
        self.groups = 1
        self.buffers: Any = None
        self._state_types: Sequence[Any] = getattr(args, "state_types", None) or ()
        self._undo = ExitStack()

    def bind_regauge(self, queue: Any) -> None:
        """Read, verify and bind the pools of SGLang's queue, and open the links.

        Raises ConfigError and EngineError for what this adapter does not carry, and for pools that do not lie as declared.
        """
        given = os.environ.get(settings.SGLANG)
        if not given:
            raise ConfigError(
                f"{settings.SGLANG}: name the file with this engine's settings; see docs/engines/sglang.md"
            )
        own, scheduler, pool, parallel = (
            settings.load(Path(given)),
            queue.scheduler,
            queue.token_to_kv_pool,
            get_parallel(),
        )
        _refuse(scheduler, parallel)
        hf, name = scheduler.model_config.hf_config, own.model or Path(self.server_args.model_path).name
        model = model_from_config(hf.to_dict(), name=name)
        rank, size = int(parallel.attn_tp_rank), int(parallel.attn_tp_size)

        def family(index: int, of: int) -> Layout:
            return pools.declared(pool, model, tp=of, rank=index)

        layout = pools.read(pool, model, tp=size, rank=rank)
        pools.verify(layout, pool)
        ends = open_ends(layout, family, own, rank, engine=ENGINE, sends=self.prefills, receives=not self.prefills)
        self._undo.callback(ends.close)
        self.buffers, self.groups = queue.metadata_buffers, len(layout.groups)
        self.windowed = pools.windowed(pool, layout)
        try:
            if self.prefills:
                self._open_prefill(ends, own, rank, size, pool.page_size)
            else:
                self._open_decode(ends, own, rank, size)
        except BaseException:  # whatever broke, also an interrupt: the links go too
            self._undo.close()
            raise
        log.info("kv pools verified", rank=f"{own.name}.{rank}", layout=layout.digest()[:16], groups=self.groups)

    def _open_prefill(self, ends: Ends, own: settings.Settings, rank: int, size: int, page_size: int) -> None:
        out = _end(ends.out)
        self.prefill = PrefillRank(ends, page_size, self.windowed, wait_s=own.transfer.offer_s)
        port = get_disagg().disaggregation_bootstrap_port if rank == 0 else 0

        async def start() -> tuple[RoomsDoor, Address]:
            door = RoomsDoor(self.prefill.board, own.key(), own.transfer, secrets.token_hex(16))
            return door, await door.start(_plane(own), port)

        door, address = out.run(start(), START_S)
        self._undo.callback(lambda: out.run(door.close(), START_S))
        ranks = _gathered((f"{own.name}.{rank}", address), size)
        out.post(door.announce, ranks)
        log.info("rooms", rank=f"{own.name}.{rank}", address=address)

    def _open_decode(self, ends: Ends, own: settings.Settings, rank: int, size: int) -> None:
        into = _end(ends.into)
        ranks = _gathered((f"{own.name}.{rank}", into.address), size)

        def over(room: int, reason: str) -> None:
            self.decode.over(room, reason)

        async def start() -> Callers:
            return Callers(own.key(), own.transfer, _plane(own), over, asks=rank == 0)

        callers = into.run(start(), START_S)
        self._undo.callback(lambda: into.run(callers.close(), START_S))
        self.decode = DecodeRank(ends, callers, ranks)
        log.info("control", rank=f"{own.name}.{rank}", address=into.address)

    def windows(self, state_indices: Sequence[Any] | None) -> dict[int, list[int]]:
        """Return the pages of each windowed group, which SGLang hands over as a state of its own."""
        if not self.windowed or not state_indices:
            return {}
        pages = state_indices[list(self._state_types).index(StateType.SWA)]
        return {group: [int(page) for page in pages] for group in self.windowed}

    def register_to_bootstrap(self) -> None:
        """Nothing: prefill's rank 0 answers at the bootstrap port itself."""

    def teardown(self) -> None:
        """End the links."""
        self._undo.close()

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Every address may be a prefill engine's; whether it is one, the receiver finds out without waiting."""
        return True

    def should_verify_kv_checksum(self, bootstrap_addr: str) -> bool:
        """No: layouts may differ, and the links compare digests of their own."""
        return False

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether nothing writes the pages of a failed room any more."""
        return self.decode.quiet(bootstrap_room)

    def clear_deferred_abort_state(self, bootstrap_room: int) -> None:
        """Nothing is kept for it."""

    def submit_prefill_recompute(self, receiver: Receiver, payload: Any) -> None:
        """Fail the request: prefill cannot be asked anew for one that was retracted."""
        receiver.give_up("a retracted request cannot be recomputed by prefill over this backend")


class Sender(BaseKVSender):  # type: ignore[misc]
    """One request of prefill."""

    supports_host_tensor_indices = False

    def __init__(
        self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
        self._rank = mgr.prefill
        self._room: Sending = self._rank.open(bootstrap_room, bootstrap_addr)
        self._aux: int | None = None
        self._logprobs: int | None = None

    def begin_regauge(self, req: Any) -> None:
        """SGLang's request, of which the sender is told so little."""
        self._logprobs = req.logprob.top_logprobs_num if req.return_logprob else None
        self._rank.begin(self._room, len(req.origin_input_ids))

    @property
    def conclude_state(self) -> int | None:
        """How it has ended, if it has."""
        return _concluded(self._rank.poll(self._room))

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """The scheduler takes it up; `aux_index`: its row."""
        self._aux, self._room.sending = aux_index, True

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        """Also a last chunk without pages: it ends the transfer."""
        return num_pages > 0 or last_chunk

    def send(
        self, kv_indices: Any, state_indices: Sequence[Any] | None = None, num_kv_tokens: int | None = None
    ) -> None:  # fmt: skip
        """The next tokens lie in these pages; states come with the last of them, whose row is filled by then."""
        last = None
        if state_indices is not None and self._aux is not None:
            last = handover.encode(row.read(self.kv_mgr.buffers, self._aux, self._logprobs))
        pages = [int(page) for page in kv_indices]
        self._rank.send(self._room, pages, num_kv_tokens or 0, last, self.kv_mgr.windows(state_indices))

    def poll(self) -> int:
        """How far it is, as `KVPoll`."""
        return int(self._rank.poll(self._room))

    def poll_pp_consensus(self) -> int:
        """There is one pipeline stage."""
        return self.poll()

    def failure_exception(self) -> NoReturn:
        """Raise what SGLang shows the client; the scheduler takes the pages back after it."""
        reason = self._rank.reason(self._room)
        self._rank.abandon(self._room)
        self._rank.forget(self._room)
        _fail(self.bootstrap_room, reason)

    def clear(self) -> None:
        """The scheduler is done with it."""
        self._rank.forget(self._room)

    def abort(self) -> None:
        """Give it up, and tell decode."""
        self._rank.cancel(self._room, "prefill's request was aborted")

    def get_transfer_metric(self) -> Any:
        """Seconds from the grant to the commit, and bytes on the wire."""
        done = self._room.done
        if done is None:
            return KVTransferMetric()
        return KVTransferMetric(transfer_latency_s=done.seconds, transfer_total_bytes=done.wire_bytes)


class Receiver(BaseKVReceiver):  # type: ignore[misc]
    """One request of decode."""

    require_staging = False
    bootstrap_infos: tuple[()] = ()

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr, self.bootstrap_room = mgr, bootstrap_room
        self.abort_notified = False
        self._rank = mgr.decode
        self._room: Receiving = self._rank.open(bootstrap_room or 0, bootstrap_addr)
        self._aux: int | None = None
        self._written = False

    def begin_regauge(self, tokens: int) -> None:
        """The prompt has so many tokens."""
        self._room.tokens = tokens

    @property
    def conclude_state(self) -> int | None:
        """How it has ended, if it has."""
        return _concluded(self._rank.poll(self._room))

    def init(self, prefill_dp_rank: int) -> None:
        """SGLang knows its prefill engine, which over this backend it always does."""
        self._room.inited = True

    def send_metadata(
        self, kv_indices: Any, aux_index: int | None = None, state_indices: Sequence[Any] | None = None,
        decode_prefix_len: int | None = None, destination: Any = None, device_kv_indices: Any = None,
    ) -> None:  # fmt: skip
        """Pages for the tokens from `decode_prefix_len` on, and the row for the first one."""
        self._aux = aux_index
        first, pages = decode_prefix_len or 0, [int(page) for page in kv_indices]
        windows, size = self.kv_mgr.windows(state_indices), self.kv_mgr.kv_args.page_size
        whole = -(-self._room.tokens // size) * size
        tables = [
            (own, whole - len(own) * size) if (own := windows.get(group)) is not None else (pages, first)
            for group in range(self.kv_mgr.groups)
        ]
        self._rank.receive(self._room, tables, first)

    def poll(self) -> int:
        """How far it is, as `KVPoll`; the row is there before SUCCESS is said."""
        state = self._rank.poll(self._room)
        if state is State.SUCCESS and not self._written:
            self._written = True
            try:
                if self._room.handover is None or self._aux is None:
                    raise EngineError("prefill sent no first token")
                row.write(self.kv_mgr.buffers, self._aux, self._room.handover, self._room.room)
            except RegaugeError as error:
                self._room.spoil(str(error))
                return int(State.FAILED)
        return int(state)

    def failure_exception(self) -> NoReturn:
        """Raise what SGLang shows the client."""
        reason = self._rank.reason(self._room)
        self._rank.abort(self._room, "it failed on another rank of this engine")
        _fail(self._room.room, reason)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """The request has failed, maybe on another rank: give it up here, and hold its pages while something may write them."""
        self._rank.abort(self._room, "it failed on another rank of this engine")
        self.abort_notified = not self._rank.quiet(self._room.room)

    def give_up(self, reason: str) -> None:
        """Fail it for a reason of this adapter's own."""
        self._rank.abort(self._room, reason)

    def clear(self) -> None:
        """The scheduler is done with it."""
        self._rank.forget(self._room)

    def abort(self) -> None:
        """Give it up, and tell prefill."""
        self._rank.abort(self._room, "decode's request was aborted")


class Bootstrap(BaseKVBootstrapServer):  # type: ignore[misc]
    """Nothing in SGLang's launcher: prefill's rank 0 answers at this port itself, to who has the key."""

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port


def _refuse(scheduler: Any, parallel: Any) -> None:
    """Raise ConfigError for what this adapter does not carry."""
    wrong = {
        "--dp-size": parallel.dp_size > 1,
        "--pp-size": parallel.pp_size > 1,
        "context parallelism": parallel.attn_cp_size > 1 or parallel.attn_dcp_size > 1,
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "--disaggregation-decode-allocation-policy": get_disagg().disaggregation_decode_allocation_policy != "early",
        "optimistic prefill": bool(get_disagg().optimistic_prefill_attempts),
        "overlap scheduling (give --disable-overlap-schedule)": scheduler.enable_overlap,
    }
    if found := [what for what, is_on in wrong.items() if is_on]:
        raise ConfigError(f"not carried by this adapter of SGLang: {', '.join(found)}")


def _gathered(own: tuple[str, Address], size: int) -> Mapping[str, Address]:
    """Return what every tensor-parallel rank says of itself, in order; they all ask at once."""
    return dict(get_parallel().world_group.all_gather_object(own)) if size > 1 else dict([own])


def _plane(own: settings.Settings) -> str:
    return own.rooms or own.transfer.control or own.transfer.host


def _end(end: Bridge | None) -> Any:
    if end is None:
        raise EngineError("this rank's links were not opened for its role")
    return end


def _concluded(state: State) -> int | None:
    return int(state) if state in (State.FAILED, State.SUCCESS) else None


def _fail(room: int, reason: str) -> NoReturn:
    raise KVTransferError(room, reason or "it failed on another rank of this engine", is_from_another_rank=not reason)
