"""What is simulated, as a person writes it: one TOML file, checked field by field before anything runs.

    [model]
    name = "glm-5.2"
    [prefill]
    device = "mtt-s5000"
    servers = 12
    [decode]
    device = "h200"
    servers = 1
    [trace]
    file = "mooncake_conversation.jsonl"

`setup.py` makes a cluster of it. Times are seconds, GB is 10^9 bytes, what is left out has the default below.
"""

from __future__ import annotations

import difflib
import re
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from regauge import toml
from regauge.config_route import PolicyName, RouteConfig
from regauge.errors import ConfigError
from regauge.sim import faults

Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
Few = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
Some = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Name = Annotated[str, msgspec.Meta(max_length=4096)]
Transfers = Literal["fluid", "flow", "protocol"]
FlowName = Literal["credit", "uncontrolled", "peer-fifo", "fair-share"]
TopologyName = Literal["switch", "racks", "fat-tree", "rails"]

SCENARIOS = ("article", "large")
"""That come with regauge; `regauge sim article` runs one."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model, for operations of a prompt and bytes of its KV."""

    name: Name = "glm-5.2"
    """A shipped layout preset, a Hugging Face folder or a config.json."""
    kv: Name = "fp8_e4m3"
    """Short form of the layout that crosses (`regauge layout`)."""
    weight_bits: Annotated[float, msgspec.Meta(ge=1, le=32)] = 8.0
    """Of one parameter, in decode's memory."""
    active_b: Positive | None = None
    """Parameters that a token goes through, 10^9; none: as the catalogue says."""
    total_b: Positive | None = None


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both kinds of workers have: a worker is a server of cards."""

    device: Name = ""
    """Key of the catalogue; empty: the constants below say how it computes."""
    servers: Few = 1
    cards: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    """Of a server; 0: as many as the catalogue says."""
    nics: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    """Of a server; 0: as the catalogue says, or 1."""
    nic: Name = ""
    """Key of the catalogue; empty: the device's, or 400g."""
    nic_gb_per_s: Positive | None = None
    """Of one NIC, payload; none: the catalogue's line rate times its share."""


class PrefillPool(Pool, frozen=True, forbid_unknown_fields=True):
    """The workers that compute prompts."""

    device: Name = "mtt-s5000"
    servers: Few = 12
    efficiency: Share = 0.3
    """Part of the peak that is reached: about what the S5000's vendor tells of DeepSeek-V3 (32,000 tokens/s on 8 cards)."""
    overhead_s: Some = 0.05
    """Of a prompt, beside its tokens."""
    tokens_per_s: Positive | None = None
    """Speed of a short prompt; given, it stands in place of the device's, with"""
    attention_s: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """seconds per pair of tokens."""
    cache_tokens: Tokens = 1_000_000
    """Tokens that a worker's prefix cache holds."""
    speeds: dict[str, Positive] = {}
    """Worker, such as "p3" -> its speed over the others'."""


class DecodePool(Pool, frozen=True, forbid_unknown_fields=True):
    """The workers that generate."""

    device: Name = "h200"
    servers: Few = 1
    memory: Share = 0.6
    """Part of the memory's bandwidth that is reached,"""
    efficiency: Share = 0.3
    """and of the peak rate."""
    overhead_s: Some = 0.0
    """Of a step, beside its reading and computing."""
    slots: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 256
    """Most requests of one worker that are there together."""
    kv_tokens: Tokens | None = None
    """Tokens whose KV a worker holds; none: what its memory leaves beside the weights."""
    reserve: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1
    """Part of the memory that holds neither weights nor KV."""
    page_tokens: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 64
    step_s: Positive | None = None
    """A decode step of an empty batch; given, it stands in place of the device's, with"""
    step_more_s: Some | None = None
    """what each request adds."""


class NetworkTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the workers are joined, and who may send when."""

    topology: TopologyName = "switch"
    """One switch; a switch for each rack and a spine; a three-tier fat tree; or NIC i of all servers on leaf i."""
    switch_ports: Few = 128
    """Of each switch; of a fat tree, see"""
    tree: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """Ports of a fat tree's switches; 0: the fewest that do."""
    racks: Few = 1
    """Of topology racks: servers are dealt to them in turn."""
    uplinks: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    """Cables of each rack or rail to the spine; rails do without (0) where both sides have as many NICs."""
    transfers: Transfers = "fluid"
    """Level of detail: max-min fair flows; the real flow control's credit; the real protocol's messages, too."""
    flow: FlowName = "credit"
    """Flow control, of `transfers = "flow"`."""


class TraceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which requests come. Without `file`: conversations made by the seed, or like those of the trace `like`."""

    file: Name = ""
    format: Name = "auto"
    scale: Positive = 1.0
    """Times as fast as it came."""
    slice: Name = ""
    """Part of the trace: seconds `600:1200`, or requests `0:5000r`."""
    copies: Few = 1
    """Of the trace at once, by other users."""
    like: Name = ""
    requests: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    """Most requests; 0: all of a file, 2,000 made ones."""
    rate: Positive | None = None
    """Made requests per second, or sessions per second of a trace that does not say when they begin; none: 1, or as in `like`."""


class Slo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What counts as good: goodput is of requests within both."""

    ttft_s: Positive = 10.0
    tpot_s: Positive = 0.1


class RunTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often, and what is compared."""

    seeds: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1
    first_seed: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)] = 1
    warm: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.1
    """Part of the requests, from the first, that fill the caches and are not counted."""
    policies: list[PolicyName] = []
    """Routing policies that are compared; none: that of [route]."""
    flows: list[FlowName] = []
    """Flow controls that are compared; none: that of [network]."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a simulation depends on, but for the files that it names."""

    model: Model = Model()
    prefill: PrefillPool = PrefillPool()
    decode: DecodePool = DecodePool()
    network: NetworkTable = NetworkTable()
    trace: TraceTable = TraceTable()
    route: RouteConfig = RouteConfig()
    slo: Slo = Slo()
    run: RunTable = RunTable()
    faults: list[dict[str, Any]] = []
    """What goes wrong when: entries as in `faults.py`."""
    catalogue: list[Name] = []
    """Files laid over the shipped catalogue, relative to the scenario's."""


def load(source: str) -> Scenario:
    """Read a scenario's file, or the shipped one of that name. Raises ConfigError with file, field and remedy."""
    if source in SCENARIOS:
        return decode((files("regauge.sim") / "scenarios" / f"{source}.toml").read_bytes(), source)
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        near = difflib.get_close_matches(source, SCENARIOS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; shipped ones: {', '.join(SCENARIOS)}"
        raise ConfigError(f"{source}: cannot be read: {error.strerror}{hint}") from error
    return _placed(decode(data, source), path.parent)


def decode(data: bytes, where: str = "scenario") -> Scenario:
    """Return the scenario of a file's bytes. Raises ConfigError naming `where`, the field and what it may be."""
    try:
        found = toml.decode(data, Scenario)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {_explained(str(error))}") from error
    except ConfigError as error:  # of a struct that checks itself
        raise ConfigError(f"{where}: {error}") from error
    return checked(found, where)


def override(scenario: Scenario, given: dict[str, dict[str, Any]]) -> Scenario:
    """Return the scenario with fields of its tables replaced, as the command line gives them: table -> field -> value.

    Raises ConfigError as `decode`, its fields named as in the file.
    """
    plain = msgspec.to_builtins(scenario)
    for table, fields in given.items():
        plain[table] = {**plain[table], **fields}
    try:
        return checked(msgspec.convert(plain, Scenario), "options")
    except msgspec.ValidationError as error:
        raise ConfigError(f"options: {_explained(str(error))}") from error


def checked(scenario: Scenario, where: str) -> Scenario:
    """Return the scenario if its fields agree. Raises ConfigError for what no single field's range forbids."""
    _finite(msgspec.to_builtins(scenario), where, "")
    _together(scenario, where)
    faults.parse(scenario.faults, where)
    return scenario


def _together(found: Scenario, where: str) -> None:
    prefill, decode, trace, network = found.prefill, found.decode, found.trace, found.network
    wrong = {
        "trace.like: give it or trace.file, not both": trace.file and trace.like,
        "prefill.attention_s: goes with prefill.tokens_per_s, which stands in place of the device":
            prefill.attention_s is not None and prefill.tokens_per_s is None,
        "decode.step_more_s: goes with decode.step_s, which stands in place of the device":
            decode.step_more_s is not None and decode.step_s is None,
        'prefill: give a device of the catalogue (`regauge plan devices`), or tokens_per_s and device = ""':
            not prefill.device and prefill.tokens_per_s is None,
        'decode: give a device of the catalogue, or step_s, kv_tokens and device = ""':
            not decode.device and (decode.step_s is None or decode.kv_tokens is None),
        'network.racks: goes with topology = "racks", which wants two or more':
            (network.racks > 1) != (network.topology == "racks"),
        'network.uplinks: goes with topology = "racks" (one or more) or "rails"':
            (network.uplinks and network.topology not in ("racks", "rails"))
            or (network.topology == "racks" and not network.uplinks),
        'network.tree: goes with topology = "fat-tree"': network.tree and network.topology != "fat-tree",
        'run.flows: flow control is compared at network.transfers = "flow"':
            found.run.flows and network.transfers == "fluid",
        "route.offload: a scenario's decode workers compute no prompts; leave it and route.offload_tokens out":
            found.route.offload == "auto" or found.route.offload_tokens,
    }  # fmt: skip
    if not trace.file:
        unused = {"scale": trace.scale != 1.0, "copies": trace.copies != 1}
        unused |= {} if trace.like else {"slice": trace.slice != "", "format": trace.format != "auto"}
        wrong |= {
            f"trace.{name}: is of a trace that is read; give trace.file (--trace), too": so
            for name, so in unused.items()
        }
    for what, so in wrong.items():
        if so:
            raise ConfigError(f"{where}: {what}")
    for name in prefill.speeds:
        if not re.fullmatch(r"p\d+", name) or int(name[1:]) >= prefill.servers:
            raise ConfigError(f"{where}: prefill.speeds.{name}: workers are p0 to p{prefill.servers - 1}")


def _finite(value: object, where: str, path: str) -> None:
    if isinstance(value, float) and not isfinite(value):
        raise ConfigError(f"{where}: {path[1:]}: must be finite, not {value}")
    if isinstance(value, dict):
        for key, each in value.items():
            _finite(each, where, f"{path}.{key}")


def _explained(message: str) -> str:
    """Return msgspec's message with the field named as people write it, and the nearest known key for an unknown one."""
    told = re.fullmatch(r"(.*?)(?: - at `\$\.?(.*)`)?", message, re.DOTALL)
    text, path = (told[1], told[2] or "") if told else (message, "")
    unknown = re.search(r"unknown field `(.*)`", text)
    if unknown is None:
        return f"{path}: {text[:1].lower()}{text[1:]}" if path else text
    known = _known(path)
    near = difflib.get_close_matches(unknown[1], known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"{path + '.' if path else ''}{unknown[1]}: no such {'field' if path else 'table'}; {hint}"


def _known(path: str) -> list[str]:
    kinds = {field.encode_name: field.type for field in msgspec.structs.fields(Scenario)}
    kind: Any = kinds.get(path, Scenario)
    return [field.encode_name for field in msgspec.structs.fields(kind)]


def _placed(scenario: Scenario, folder: Path) -> Scenario:
    """Make the files that a scenario names relative to its own folder."""

    def at(name: str) -> str:
        return str(folder / name) if name else ""

    trace = msgspec.structs.replace(scenario.trace, file=at(scenario.trace.file), like=at(scenario.trace.like))
    return msgspec.structs.replace(scenario, trace=trace, catalogue=[at(name) for name in scenario.catalogue])
