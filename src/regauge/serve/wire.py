"""The contract between the gateway and a worker process: JSON over HTTP/1.1, `Authorization: Bearer TOKEN`.

| call | of | body | answer |
|---|---|---|---|
| `GET /health` | both | - | `Health` |
| `POST /internal/generate` | decode | `Generate` | 200, then one `Event` a line (NDJSON) |
| `POST /internal/prefill` | prefill | `Prefill` | 200 and `Prefilled`, once the KV cache is committed |
| `GET /debug/transfers?limit=N` | both | - | `WorkerState` |
| `GET /internal/trace/{transfer_id}` | both | - | `move.events.Traces`: what has happened to the transfer here |
| `GET /internal/cache?since=N&instance=I` | both | - | `CacheNews`: what the prefix cache has gained and lost after event N |
| `DELETE /internal/cache` | both | - | likewise, once all is given up that nobody reads |
| `DELETE /internal/requests/{request_id}` | both | - | 200 and `Aborted`; pages are freed |
| `GET /internal/receipts?since=N&limit=M` | both | - | `Receipts`: the oldest after the N-th |
| `POST /internal/role` | both | `Roles` | `Health`: it takes requests of these roles alone from now on |

An error before the first byte of an answer is an `ErrorEvent` under the HTTP status that `STATUS` gives for its code. The decode stream begins with
the transfer, so that an early end does not lose its figures. It carries *every* generated token, the one that prefill sampled included, and a stop
token as well; `completion_tokens` counts them all. An answer that another worker began goes on from `generated`: only new tokens are sent and counted
then, and what is there is counted as prompt. A finish or error event is the last line: a stream that ends without either means that the worker died.
A client that closes its connection before then aborts the request. A worker keeps an idle connection for at least 5 seconds.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from regauge.config import EngineName, Port, Role, ServeConfig
from regauge.engines.local.sampling import SamplingParams as SamplingParams  # noqa: PLC0414  # re-exported
from regauge.errors import ConfigError, ProtocolError
from regauge.meter.receipt import MAX_TEXT
from regauge.move.protocol import Stages
from regauge.plan.cost import Mode
from regauge.serve.health import Health as Health  # noqa: PLC0414  # re-exported
from regauge.serve.health import NicLoad as NicLoad  # noqa: PLC0414  # re-exported

GENERATE_PATH: Final = "/internal/generate"
PREFILL_PATH: Final = "/internal/prefill"
TRACE_PATH: Final = "/internal/trace"
CACHE_PATH: Final = "/internal/cache"
REQUESTS_PATH: Final = "/internal/requests"
RECEIPTS_PATH: Final = "/internal/receipts"
ROLE_PATH: Final = "/internal/role"
HEALTH_PATH: Final = "/health"
DEBUG_PATH: Final = "/debug/transfers"
WORKER_HOST: Final = "127.0.0.1"
"""Where a worker answers its gateway, which is on the same machine."""
NDJSON: Final = "application/x-ndjson"
MAX_RECEIPTS: Final = 1_000  # in one answer

LOWEST_LOGPROB: Final = -9999.0
"""JSON has no infinity: a token of probability zero is sent with this log-probability."""

Salt = Annotated[str, msgspec.Meta(max_length=256)]

Code = Literal[
    "bad_request",  # the body does not fit the contract
    "unauthorized",  # wrong or missing bearer token
    "duplicate_request",  # this request_id is in the house already
    "prompt_too_large",  # the pool could not hold the request even if it were empty
    "queue_full",  # try again later
    "draining",  # the worker is shutting down, or does not take requests of this role just now
    "transfer_failed",  # the KV cache did not arrive, or arrived wrong
    "engine_failed",  # the model's computation failed
    "aborted",  # somebody sent DELETE
    "timeout",  # a limit of the worker passed
]

STATUS: Final = MappingProxyType[Code, int](
    {
        "bad_request": 400,
        "unauthorized": 401,
        "duplicate_request": 409,
        "prompt_too_large": 413,
        "queue_full": 429,
        "aborted": 499,
        "engine_failed": 500,
        "transfer_failed": 502,
        "draining": 503,
        "timeout": 504,
    }
)
"""HTTP status of an error that comes before the first byte of an answer."""


Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class MeterTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker's receipt says of a request and the worker cannot know: see `meter.receipt.Receipt`. Names, `request_id` too, are printable and have at most MAX_TEXT characters."""

    tenant: Text
    prefill: Text = ""
    """Name of the prefill worker; empty: decode computes the prompt itself."""
    decode: Text = ""
    route: Text = ""
    resumes: Text = ""
    """The request that has paid for this one's input: it goes on from that, or answers its prompt once more."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name).isprintable():
                raise ValueError(f"{name}: give printable characters")


class Generate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To the decode worker: reserve pages for the prompt, `token_ids`, await the transfer, decode.

    `token_ids` and `generated` together are the text so far; `sampling` is that of the whole answer, `max_tokens` and `min_tokens` of which `generated` are there.
    """

    request_id: str
    transfer_id: str
    token_ids: list[int]
    sampling: SamplingParams
    prefill: list[str]
    """Names of the prefill worker's ranks, in order, that will send the KV cache; none: compute it here (`Health.computes`)."""
    generated: list[int] = []
    """What another worker has generated of the answer. Its `TokenEvent.seed` belongs into `sampling` then: the same tokens follow as would have."""
    meter: MeterTag | None = None
    """None: the request is not metered, and leaves no receipt."""
    salt: Salt = ""
    """As in `Prefill`."""


class Prefill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To the prefill worker: compute the KV cache of the prompt, `token_ids`, and the first token, deliver both."""

    request_id: str
    transfer_id: str
    token_ids: list[int]
    sampling: SamplingParams
    decode: dict[str, tuple[str, Port]]
    """Control addresses of the decode worker's ranks, by name, in order: they take the KV cache."""
    handover: bool = True
    """Whether decode goes on from the first token that prefill samples; an engine that samples it itself does not."""
    generated: list[int] = []
    """As in `Generate`: computed and delivered like the prompt."""
    meter: MeterTag | None = None
    salt: Salt = ""
    """Prompts of unlike salts, as of tenants that must not learn of each other's, share nothing of the prefix cache."""


class TransferEvent(msgspec.Struct, frozen=True, tag_field="type", tag="transfer"):
    """The KV cache is here: the verdict's path, bytes on the wire, pages filled, seconds from grant to commit, boxes (0, None: not known), stages."""

    path: str
    mode: Mode
    wire_bytes: int
    pages: int
    seconds: float
    cached_tokens: int | None = None
    """Of the prompt, that prefill had cached, as its hand-over says; None: it does not."""
    spans: int = 0
    stages: Stages | None = None


class TokenEvent(msgspec.Struct, frozen=True, tag_field="type", tag="token", omit_defaults=True):
    """One generated token; `logprob` and `top` (id, logprob; likeliest first) only if asked for."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    seed: int | None = None
    """With the first token of a stream, where the random stream can be gone on with elsewhere: what `sampling.seed` must be there."""
    cached_tokens: int | None = None
    """With the first token: of a prompt that this worker computed itself."""


class FinishEvent(msgspec.Struct, frozen=True, tag_field="type", tag="finish"):
    """The stream's good end: a stop token ("stop"), or max_tokens or the context limit ("length"). `queue_seconds`: until it had pages and, without a prefill worker, its turn."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None
    """Of a prompt that this worker computed itself."""
    receipt: str = ""
    """One line of JSON, as `meter.receipt.encode` writes it; empty: the request is not metered. Likewise below."""
    queue_seconds: float | None = None


class ErrorEvent(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The request failed; `worker` is the name of the worker that says so."""

    code: Code
    message: str
    worker: str
    receipt: str = ""


class Prefilled(msgspec.Struct, frozen=True, tag_field="type", tag="prefilled"):
    """The KV cache is committed. `queue_seconds` went by before, `prefill_seconds` is computing, `transfer_seconds` what came after."""

    first_token: int
    computed_tokens: int
    cached_tokens: int
    prefill_seconds: float
    transfer_seconds: float
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    """Of the first token, where they were asked for and the hand-over does not carry them."""
    receipt: str = ""
    queue_seconds: float | None = None


class Aborted(msgspec.Struct, frozen=True):
    """Answer to a DELETE; `found` is false if the request was over already, or never came."""

    found: bool
    receipt: str = ""
    """Also of a request that was over already, if it is remembered."""


class Receipts(msgspec.Struct, frozen=True):
    """Receipts of this worker, oldest first, as lines; `next` is `since` of the next call. Fewer than asked for: that is all.

    The numbers go on after a restart of the worker where it has a journal. `next < since`: it has none, or has lost it, and began anew.
    """

    lines: list[str]
    next: int


class Roles(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests of which roles a worker shall take; none: it drains. Those under way go on."""

    roles: Annotated[list[Role], msgspec.Meta(max_length=2)]


Event = TransferEvent | TokenEvent | FinishEvent | ErrorEvent
PrefillReply = Prefilled | ErrorEvent
_EVENTS: Final = msgspec.json.Decoder(Event)


class RankAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of a worker, as its peers' links know it."""

    name: str
    control: tuple[str, Port] | None = None
    """Where a decode rank takes control connections."""
    status: str = ""
    """URL of the own status (`engines/status.py`) of a rank of an engine with an API; empty: it has none."""


class WorkerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a worker listens; `url` is like `http://127.0.0.1:9001`."""

    name: str
    role: Role
    url: str
    ranks: list[RankAddress] = []
    """Of the engine, in order."""
    engine: EngineName = "local"
    token: str = ""
    """Bearer token that this worker wants; empty: that of the others."""

    @property
    def senders(self) -> list[str]:
        """Names of the ranks of a prefill worker."""
        return [rank.name for rank in self.ranks]

    @property
    def receivers(self) -> dict[str, tuple[str, Port]]:
        """Control addresses of the ranks of a decode worker."""
        return {rank.name: rank.control for rank in self.ranks if rank.control is not None}

    def __repr__(self) -> str:
        """Leave the token out."""
        return f"WorkerAddress({self.name!r}, {self.role!r}, {self.url!r}, {self.engine!r}, token=...)"


class VerdictInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The pair's verdict: its path, and the sentence to show."""

    path: str
    text: str = ""


class GatewaySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that the gateway's process needs; holds the bearer token, so its file is for the owner alone."""

    config: ServeConfig
    model_folder: str
    model_name: str
    token: str
    workers: list[WorkerAddress]
    verdict: VerdictInfo
    layouts: dict[str, bytes] = {}
    """JSON of the layouts of workers that are known from the start, by name."""
    key: str = ""
    """Pre-shared key of the transfer plane, in hex, where engines' status is asked for by a token made from it."""
    name: str = "gateway"
    """As its receipts have it."""
    signing_key: str = ""
    """File of its private key (PEM); empty: nothing is metered."""
    trust: str = ""
    """Folder of the public keys whose receipts count: see `meter.receipt.load_trust`."""
    log_json: bool = False

    def __repr__(self) -> str:
        """Leave the token out."""
        return f"GatewaySpec(model_name={self.model_name!r}, workers={self.workers!r}, token=...)"


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a worker's process needs; holds secrets, so its file is for the owner alone."""

    config: ServeConfig
    name: str
    role: Role
    model_folder: str
    model_name: str
    layout: bytes
    """JSON of the pool's layout, with pages, regions not bound."""
    token: str
    key: str
    """Pre-shared key of the transfer plane, in hex."""
    port: int
    control_port: int
    """Where a decode worker takes prefill workers' control connections."""
    peers: dict[str, tuple[str, Port]]
    """Control addresses of the decode ranks that a prefill worker links to ahead of the first request."""
    roles: list[Role] = []
    """Requests of which roles it takes from the start; empty: of `role`."""
    signing_key: str = ""
    """File of the private key (PEM) that signs its receipts; empty: it makes none."""
    state: str = ""
    """Folder for its journal of receipts; empty: they are lost with the process."""
    log_json: bool = False

    def __repr__(self) -> str:
        """Leave the secrets out."""
        return f"WorkerSpec({self.name!r}, {self.role!r}, token=..., key=...)"


_Spec = TypeVar("_Spec", GatewaySpec, WorkerSpec)


def encode(message: msgspec.Struct) -> bytes:
    """Return the JSON of a message, without a line end."""
    return msgspec.json.encode(message)


def encode_line(event: Event) -> bytes:
    """Return one line of the NDJSON stream."""
    return msgspec.json.encode(event) + b"\n"


def decode_event(line: bytes) -> Event:
    """Read one line of the NDJSON stream. Raises ProtocolError that quotes the line's beginning."""
    try:
        return _EVENTS.decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"event from a worker: {error}: {line[:80]!r}") from error


def bearer(token: str) -> str:
    """Return the Authorization header's value."""
    return f"Bearer {token}"


def authorized(header: str | None, token: str) -> bool:
    """Whether an Authorization header holds the token; compares in constant time."""
    return hmac.compare_digest((header or "").encode("latin-1", "replace"), bearer(token).encode())


def write_spec(path: Path, spec: GatewaySpec) -> None:
    """Write the gateway's spec with mode 0600. Raises FileExistsError: it never writes into an old file."""
    write_private(path, msgspec.json.encode(spec))


def write_private(path: Path, data: bytes) -> None:
    """Write a new file that only its owner can read. Raises FileExistsError: it never writes into an old file."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)


def read_spec(path: Path) -> GatewaySpec:
    """Read a gateway's spec. Raises ConfigError that names the file, and the field where one is wrong."""
    return _read(path, GatewaySpec)


def read_worker_spec(path: Path) -> WorkerSpec:
    """Likewise, a worker's."""
    return _read(path, WorkerSpec)


def _read(path: Path, kind: type[_Spec]) -> _Spec:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; `regauge serve` writes this file") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}; `regauge serve` writes this file") from error
