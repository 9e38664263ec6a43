"""Every default of a running regauge, with its unit. One TOML file overrides them; unknown keys are refused.

Sizes are in tokens or bytes, times in seconds, as the field's name says.
"""

from __future__ import annotations

import os
from math import inf
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from regauge import toml
from regauge.config_bounds import MAX_S as MAX_S  # noqa: PLC0414  # re-exported
from regauge.config_bounds import Count, Limit, bound
from regauge.config_bounds import Port as Port  # noqa: PLC0414  # re-exported
from regauge.config_discovery import DiscoveryConfig, WorkerConfig
from regauge.config_gateway import GatewayConfig as GatewayConfig  # noqa: PLC0414  # re-exported
from regauge.config_meter import MeterConfig as MeterConfig  # noqa: PLC0414  # re-exported
from regauge.config_observe import ObserveConfig as ObserveConfig  # noqa: PLC0414  # re-exported
from regauge.config_planes import PlanesConfig as PlanesConfig  # noqa: PLC0414  # re-exported
from regauge.config_route import RouteConfig as RouteConfig  # noqa: PLC0414  # re-exported
from regauge.errors import ConfigError

Role = Literal["prefill", "decode"]
TransportName = Literal["shm", "tcp", "mooncake", "nixl"]
EngineName = Literal["local", "vllm", "sglang"]

BUNDLED_MODEL = "smollm2-135m-instruct"


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server of vLLM or SGLang that somebody else started, with regauge's adapter."""

    url: str
    """Of its API, as `http://10.0.0.2:8000`."""
    name: str
    """As its adapter's `name`."""
    control: str = ""
    """Decode: host of its ranks' control addresses, and port of rank 0, as `10.0.0.2:9100`: its adapter's `port`."""
    status: str = ""
    """Likewise, of the status that its adapter gives (`status_port`); empty: paths and bytes of its transfers stay unknown."""
    token_file: str = ""
    """File with the API key that it wants."""


class ServedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A server of vLLM or SGLang as this worker, started here unless `server` is given; docs/engines/."""

    python: str = ""
    """Interpreter of the environment that has the engine and regauge; empty: the one that runs here."""
    args: list[str] = []
    """Options for the engine's server, as `--block-size=32`. Model, address, context and adapter come from here."""
    ranks: Annotated[int, msgspec.Meta(ge=1, le=1_024)] = 1
    """Tensor-parallel size."""
    server: ServerConfig | None = None

    def __post_init__(self) -> None:
        if self.server is not None and (self.python or self.args):
            raise ConfigError("server: is started by somebody else: leave out python and args, or server")


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the workers of a role run, and how many there are."""

    workers: Annotated[int, msgspec.Meta(ge=1, le=256)] = 1
    """Workers of this role, each a process of its own, with a pool of its own."""
    pool_tokens: Count = 16_384
    """Tokens that the KV pool holds; rounded up to whole pages."""
    max_context: Count = 2_048
    """Most tokens of one request, prompt and answer together; capped by the model's own limit."""
    max_batch: Count = 32
    """Most requests that decode together."""
    chunk_tokens: Count = 256
    """Most prompt tokens computed in one step (chunked prefill)."""
    prefix_cache: bool = True
    """Whether computed prompts stay in the pool, as far as there is room, for later ones that begin alike."""
    threads: Annotated[int, msgspec.Meta(ge=0, le=1_024)] = 0
    """CPU threads of the model's arithmetic; 0 means an equal share of the cores among all workers, at least one."""
    vllm: ServedConfig | None = None
    """vLLM instead of the local engine; of the settings above, `max_context` and `threads` count for it, too."""
    sglang: ServedConfig | None = None
    """Likewise SGLang."""

    def __post_init__(self) -> None:
        if self.vllm is not None and self.sglang is not None:
            raise ConfigError("sglang: this worker is vLLM already: leave out vllm, or sglang")
        if self.workers > 1 and self.served is not None and self.served.server is not None:
            raise ConfigError("workers: a server that somebody else started is one worker: leave it out")

    @property
    def name(self) -> EngineName:
        """Which engine it is."""
        if self.sglang is not None:
            return "sglang"
        return "local" if self.vllm is None else "vllm"

    @property
    def served(self) -> ServedConfig | None:
        """The server that the engine is; None: it is the local one."""
        return self.vllm or self.sglang


class TlsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """PEM files for mutual TLS of control and `tcp` data connections; docs/security.md says how to make them."""

    certificate: str
    """This worker's certificate, and whatever lies between it and the authority's."""
    key: str
    authority: str
    """The certificates that sign workers, and nothing else."""


class MooncakeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Transport `mooncake`; `transfer.host` must be an IPv4 address of this host on the compute plane."""

    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: list[str] = []
    """RDMA devices, as `mlx5_0`; refused over tcp, and needed for rdma."""
    peers_per_carrier: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Most peers that write into one process of Mooncake's. Each process registers the whole pool, which takes seconds per
    100 GB with RDMA; a peer that has to be fenced by force takes the others of its process with it."""


class NixlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Transport `nixl`, over UCX."""

    devices: list[str] = []
    """Devices of the compute plane (UCX_NET_DEVICES), as `eth1` or `mlx5_0:1`; must be given."""
    transports: str = "tcp"
    """UCX_TLS: `tcp`, or `rc` and the like for RDMA."""
    peers_per_carrier: Annotated[int, msgspec.Meta(ge=1)] = 1
    """As for mooncake."""


class FlowConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a receiver hands out credit; docs/flow.md says why."""

    nic_bytes_per_s: float = 50e9
    """Line rate of each compute-plane NIC of this side (400 Gbit/s). What a link really gives is measured; this bounds it."""
    rtt_s: float = 0.001
    """Credit sent until its first bytes have landed on an idle link, before any has been measured."""

    quantum_bytes: int = 8 << 20
    """Bytes per decision: who comes next is decided anew after so many. With less than a chunk, a link waits for credit."""
    overcommit: float = 2.0
    """Credit that stands still (its sender is busy elsewhere or frozen) is replaced until all together is so many windows."""
    stall_s: float = 0.05
    """Credit of which nothing lands for so long (and for 4 delays) stands still."""
    unscheduled_bytes: int = 1 << 20
    """Transfers of at most so many bytes may go at once, without waiting for credit."""
    unscheduled_budget_bytes: int = 16 << 20
    """Most unscheduled bytes outstanding per NIC."""
    lease_s: float = 2.0
    """Credit of a sender that has shown no sign of life for so long is taken back. A sender uses credit for half of it, so
    messages must cross within the other half; later ones cost bandwidth, never correctness."""
    max_wait_s: float = 2.0
    """Transfers with bytes that have waited for credit so long get `aged_share` of the NIC, the longest wait first."""
    aged_share: float = 0.125
    urgent_s: float = 0.001
    """Deadlines are met so many seconds early: what a measured rate and delay may be wrong by."""
    fair_s: float = 0.25
    """A tenant falls behind its share by at most so many seconds of the NIC's rate."""
    shares: dict[str, float] = {}
    """Tenant -> weight; a tenant not named has weight 1."""
    commit_s: float = 10.0
    """Pages are lent to transfers whose bytes would land within so many seconds; the others wait without pages."""
    max_transfers: int = 10_000
    """Most transfers known at once; one more is refused."""
    late: Literal["shared", "last", "refuse"] = "shared"
    """What becomes of a transfer that cannot meet its deadline. "shared": it goes on by size, whenever no deadline of others is in danger; a short tail. "last": after all
    others; the fewest misses, and the late ones wait long. "refuse": not taken if it is late on arrival, else as "last"."""

    def __post_init__(self) -> None:
        where = "transfer.flow"
        times = ("rtt_s", "stall_s", "lease_s", "max_wait_s", "fair_s", "commit_s")
        bound(self, where, ("nic_bytes_per_s", *times))
        bound(self, where, ("quantum_bytes", "overcommit", "max_transfers"), least=1)
        bound(self, where, ("unscheduled_bytes", "unscheduled_budget_bytes", "urgent_s"), least=0)
        if not 0 < self.aged_share < 1:
            raise ConfigError(f"{where}.aged_share: must be between 0 and 1, not {self.aged_share}")
        for tenant, weight in self.shares.items():
            if not 0 < weight < inf:
                raise ConfigError(
                    f"{where}.shares.{tenant}: must be more than 0 and finite, not {weight}; leave it out for weight 1"
                )


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How KV crosses."""

    transport: TransportName = "shm"
    host: str = "127.0.0.1"
    """Compute plane, for data connections: an address, a network (10.210.0.0/16) or an interface of this host."""
    nics: Annotated[list[str], msgspec.Meta(max_length=16)] = []
    """`tcp`: the compute plane's NICs where a side has several, each named as `host`, which then stands for none of them. Both
    sides list theirs in the same order: the i-th is reached from the i-th."""
    control: str = ""
    """Plane of the control connections, likewise; empty: `host`."""
    lanes: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    """`tcp`: streams to each peer, 1 to 16; more where one does not fill the link."""
    tls: TlsConfig | None = None
    """`tcp` and control: encrypt, and want certificates on both sides beside the key."""
    key_file: str = ""
    """File of the pre-shared key, hexadecimal; empty: `regauge serve` makes one for its own workers."""
    mooncake: MooncakeConfig = MooncakeConfig()
    nixl: NixlConfig = NixlConfig()
    staging_bytes: Annotated[int, msgspec.Meta(ge=4_096, le=1 << 40)] = 64 << 20
    """Bytes of the staging slab on each side; bounds the chunks that are in flight."""
    mode: Literal["auto", "fused", "mapped", "staged"] = "auto"
    """How chunks are written; auto: as the cost model says (see `regauge explain`)."""
    costs: str = ""
    """TOML file of the cost model's constants, as `regauge bench calibrate --out FILE` writes it; empty: the defaults."""
    kernel_threads: Annotated[int, msgspec.Meta(ge=1, le=1_024)] = 1
    offer_s: float = 600.0
    """Most seconds that a request waits for the other side: an offer for its grant, a grant for its offer."""
    deadline_s: float = 120.0
    """Most seconds from a transfer's grant to its commit."""
    flow: FlowConfig = FlowConfig()
    """Flow control."""
    lease_s: float = 30.0
    """Most seconds that granted pages wait for a sign of life from the writer."""
    resume_s: float = 3.0
    """Most seconds that a transfer whose link broke waits for a new one; 0: it fails at once."""

    def __post_init__(self) -> None:
        bound(self, "transfer", ("offer_s", "deadline_s", "lease_s"), most=MAX_S)
        bound(self, "transfer", ("resume_s",), least=0, most=MAX_S)


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the gateway accepts."""

    max_queue: Count = 512
    """Requests in the house at once; one more is answered 429."""
    max_body_bytes: Count = 4 << 20
    default_max_tokens: Count = 256
    """Answer length of a chat request that names none, in tokens."""
    request_timeout_s: float = 600.0
    """Most seconds from a request's arrival to its last token."""
    prefill_wait_s: float = 30.0
    """Most seconds that a request which has lost its workers waits for one to come or come back, where no other can take it; 0: it fails."""

    def __post_init__(self) -> None:
        bound(self, "limits", ("request_timeout_s",), most=MAX_S)
        bound(self, "limits", ("prefill_wait_s",), least=0, most=MAX_S)


class QualityLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a conversion may do to a model's answers, each against both controls; docs/numerics.md says why these values."""

    max_kl: Limit = 0.015
    """Nats, mean over positions."""
    min_agreement: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.91
    """Share of positions with the same most likely token."""
    max_perplexity_ratio: Limit = 1.02
    """Perplexity after the crossing by the control's."""
    min_positions: Count = 256
    """Positions below which the figures are noise."""


class QualityConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a pair that converts must have a signed quality record, as `regauge bench accuracy --record` writes it."""

    require: bool = False
    records: list[str] = []
    """Files of records; one that covers the pair and meets the limits is enough."""
    trust: list[str] = []
    """Files of Ed25519 public keys (PEM) whose signature counts."""
    limits: QualityLimits = QualityLimits()


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`regauge serve`: the gateway, the prefill workers, the decode workers."""

    model: str = BUNDLED_MODEL
    """The bundled model's name, a Hugging Face folder, or a hub name."""
    host: str = "127.0.0.1"
    port: Port = 8_000
    prefill_layout: str = "fp8_e4m3,page=64,hnd"
    decode_layout: str = "bf16,page=16,nhd"
    prefill: EngineConfig = EngineConfig()
    decode: EngineConfig = EngineConfig()
    transfer: TransferConfig = TransferConfig()
    limits: LimitsConfig = LimitsConfig()
    quality: QualityConfig = QualityConfig()
    route: RouteConfig = RouteConfig()
    gateway: GatewayConfig = GatewayConfig()
    external: bool = False
    """Start no workers: `workers` and `discovery` tell of those that somebody else has started. As `--engine external`."""
    workers: Annotated[list[WorkerConfig], msgspec.Meta(max_length=10_000)] = []
    """Workers that somebody else started, beside those that are started here."""
    discovery: DiscoveryConfig = DiscoveryConfig()
    """Where more of them are learnt of."""
    meter: MeterConfig = MeterConfig()
    planes: PlanesConfig = PlanesConfig()
    observe: ObserveConfig = ObserveConfig()

    def __post_init__(self) -> None:
        if self.external and not (self.workers or self.discovery.finds):
            raise ConfigError("workers: name them, or say in discovery where they are learnt of: none is started here")

    def engine(self, role: Role) -> EngineConfig:
        """Return how the worker of a role runs."""
        return self.prefill if role == "prefill" else self.decode

    def threads(self, role: Role) -> int:
        """Return the CPU threads of each worker of a role."""
        share = (os.cpu_count() or 2) // (self.prefill.workers + self.decode.workers)
        return self.engine(role).threads or max(share, 1)


def load(path: Path) -> ServeConfig:
    """Read a TOML file. Raises ConfigError that names the file and the field."""
    try:
        return decode(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def decode(data: bytes) -> ServeConfig:
    """Read the bytes of a TOML file. Raises ConfigError that names the field."""
    try:
        return toml.decode(data, ServeConfig)
    except msgspec.DecodeError as error:
        raise ConfigError(str(error)) from error


def cache_dir() -> Path:
    """Return the folder for converted models: `$REGAUGE_CACHE`, else `$XDG_CACHE_HOME/regauge`, else `~/.cache/regauge`."""
    if own := os.environ.get("REGAUGE_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "regauge"
