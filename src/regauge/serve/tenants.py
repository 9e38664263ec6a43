"""Who asks, and how much they may: API keys, rates, quotas. One TOML file, `gateway.tenants`:

    [tenant.acme]
    keys = ["sha256:6f0c..."]            # `regauge keys new acme` makes one; several, so that keys can be changed without a gap
    expires = 2027-01-01                 # first day (UTC) on which its keys no longer hold
    tokens_per_minute = 200_000          # prompt and answer
    requests_per_minute = 600
    burst_s = 60                         # how many seconds of both rates may be used at once, after a rest
    tokens_per_month = 2_000_000_000     # months are of UTC
    max_concurrent = 64
    priority = 10                        # higher goes first where requests wait
    models = ["qwen3-32b"]               # others do not exist for it; default: all
    operator = false                     # may read /metrics from other machines
    disabled = false

A key is 256 random bits, of which the file has the SHA-256. A slow password hash would protect nothing here: it slows down the guessing of what
people choose, and nobody guesses 256 bits at any speed; it would cost each request some 100 ms instead of a microsecond.

Without a file there is one tenant, "default", without limits, and keys are not looked at.

A request is charged an estimate when it is admitted, prompt and `max_tokens`; what it did not use comes back at its end. So the limits hold at
every moment, and not only on average.
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Final, NoReturn

import msgspec

from regauge import toml
from regauge.errors import ConfigError
from regauge.serve.buckets import MAX_REQUEST_TOKENS, MAX_TENANTS, UNLIMITED, Buckets, Left, Limits, Over
from regauge.serve.openai import RATE_LIMIT, ApiError

DEFAULT: Final = "default"
KEY_PREFIX: Final = "rg-"
"""So that scanners for leaked secrets can find a key."""
AUTHENTICATION: Final = "authentication_error"
PERMISSION: Final = "permission_error"
MAX_KEYS: Final = 16
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A tenant's name: it goes into receipts, logs and file names."""
_HASH: Final = "sha256:"
_MAX_KEY: Final = 256
"""Longest key that is looked at, in bytes."""

_Rate = Annotated[int, msgspec.Meta(ge=1, le=1 << 50)]
_Hash = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
_Name = Annotated[str, msgspec.Meta(pattern=f"^{NAME.pattern}$")]
_Model = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class TenantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tenant as the file has it."""

    keys: Annotated[list[_Hash], msgspec.Meta(max_length=MAX_KEYS)]
    expires: date | None = None
    """First day (UTC) on which its keys do not hold any more."""
    tokens_per_minute: _Rate | None = None
    requests_per_minute: _Rate | None = None
    burst_s: Annotated[float, msgspec.Meta(ge=0.001, le=86_400)] = 60.0
    """Seconds of both rates that may be used at once; no request can be larger than that."""
    tokens_per_month: _Rate | None = None
    max_concurrent: _Rate | None = None
    priority: Annotated[int, msgspec.Meta(ge=-100, le=100)] = 0
    """Higher goes first."""
    models: Annotated[list[_Model], msgspec.Meta(max_length=1_024)] | None = None
    operator: bool = False
    """Whether it may read /metrics, which is of all tenants together, from other machines."""
    disabled: bool = False

    def limits(self) -> Limits:
        """Return them by the second; a burst holds at least one request."""

        def rate(a_minute: int | None) -> float:
            return math.inf if a_minute is None else a_minute / 60

        tokens, requests = rate(self.tokens_per_minute), rate(self.requests_per_minute)
        return Limits(
            tokens, tokens * self.burst_s, requests, max(requests * self.burst_s, 1.0),
            math.inf if self.tokens_per_month is None else self.tokens_per_month,
            math.inf if self.max_concurrent is None else self.max_concurrent,
        )  # fmt: skip


class TenantsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    tenant: Annotated[dict[_Name, TenantConfig], msgspec.Meta(min_length=1, max_length=MAX_TENANTS // 2)]


@dataclass(frozen=True)
class Tenant:
    """Who asks."""

    name: str
    priority: int = 0
    models: frozenset[str] | None = None
    """None: all."""
    operator: bool = False
    limits: Limits = UNLIMITED
    slot: int = field(default=0, repr=False)
    disabled: bool = False
    expires: float = math.inf
    """Seconds since 1970."""

    def allows(self, model: str) -> bool:
        """Whether it may use a model. To others it does not exist: 404, as for a name that is none."""
        return self.models is None or model in self.models


@dataclass(eq=False)
class Grant:
    """What one request was charged. `used` is set while it runs; `Tenants.settle` ends it, once."""

    tenant: Tenant
    tokens: int
    month: int
    left: Left
    used: int = 0
    settled: bool = False

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's `x-ratelimit-*`, as raw headers; none for limits that the tenant does not have."""
        limits, rest = self.tenant.limits, self.left
        found = []
        for kind, burst, left, reset in (
            (b"requests", limits.request_burst, rest.requests, rest.request_reset_s),
            (b"tokens", limits.token_burst, rest.tokens, rest.token_reset_s),
        ):
            if burst != math.inf:
                found += [
                    (b"x-ratelimit-limit-" + kind, b"%d" % burst),
                    (b"x-ratelimit-remaining-" + kind, b"%d" % left),
                    (b"x-ratelimit-reset-" + kind, duration(reset).encode()),
                ]
        return found


class Tenants:
    """All tenants, and what they have used. For one thread."""

    def __init__(
        self,
        file: Path | None = None,
        buckets: Buckets | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._file = file
        self._buckets = Buckets() if buckets is None else buckets
        self._clock = clock
        self._wall = wall
        self._default = Tenant(DEFAULT, operator=True, slot=self._buckets.claim(DEFAULT))
        self._by_name: dict[str, Tenant] = {DEFAULT: self._default}
        self._by_key: dict[bytes, Tenant] | None = None

    @classmethod
    def load(cls, path: Path | None, buckets: Buckets | None = None) -> Tenants:
        """Read the file; None: there is one tenant, and no keys. Raises ConfigError that names the field."""
        tenants = cls(path, buckets)
        tenants.reload()
        return tenants

    @property
    def open(self) -> bool:
        """Whether anybody may ask, without a key."""
        return self._by_key is None

    @property
    def names(self) -> list[str]:
        """Return all of them."""
        return sorted(self._by_name)

    def reload(self) -> None:
        """Read the file anew, for requests that come from now on. Raises ConfigError: all stays as it was."""
        if self._file is None:
            return
        by_name: dict[str, Tenant] = {}
        by_key: dict[bytes, Tenant] = {}
        for name, each in read(self._file).tenant.items():
            expires = math.inf
            if each.expires is not None:
                expires = datetime(each.expires.year, each.expires.month, each.expires.day, tzinfo=UTC).timestamp()
            by_name[name] = Tenant(
                name, each.priority, None if each.models is None else frozenset(each.models), each.operator,
                each.limits(), self._buckets.claim(name), each.disabled, expires,
            )  # fmt: skip
            for text in each.keys:
                digest = bytes.fromhex(text.removeprefix(_HASH))
                if digest in by_key:
                    raise ConfigError(
                        f"{self._file}: tenant.{name}.keys: {text[:15]}... is {by_key[digest].name}'s, too; a key has one owner"
                    )
                by_key[digest] = by_name[name]
        self._by_name, self._by_key = by_name, by_key

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
        """Return whose key these (raw, lower-case) headers hold. Raises ApiError: 401 for none or an unknown one, 403 for one that is shut off."""
        if self._by_key is None:
            return self._default
        key = _key(headers)
        digest = hashlib.sha256(key).digest()
        # What is looked up is a hash, of which nobody can choose a part: the time of the look-up tells nothing of any key.
        tenant = self._by_key.get(digest)
        if tenant is None:
            raise _denied("this API key is not known; ask the operator of this server for one")
        if tenant.disabled:
            raise ApiError(403, "this API key is disabled", type=PERMISSION, code="key_disabled")
        if self._wall() >= tenant.expires:
            raise ApiError(401, "this API key has expired", type=AUTHENTICATION, code="key_expired")
        return tenant

    def take(self, tenant: Tenant, tokens: int) -> Grant:
        """Charge a request that begins with what it can come to, prompt and most tokens of its answers. Raises ApiError 429."""
        cost = min(max(tokens, 0), MAX_REQUEST_TOKENS)
        month = month_of(self._wall())
        answer = self._buckets.take(tenant.slot, tenant.limits, cost, self._clock(), month)
        if isinstance(answer, Over):
            self._refuse(tenant, answer, cost)
        return Grant(tenant, cost, month, answer)

    def settle(self, grant: Grant, used: int | None = None) -> None:
        """Give back what a request did not use, `grant.used` if not said here; a second time does nothing."""
        if grant.settled:
            return
        grant.settled = True
        grant.used = grant.used if used is None else used
        self._buckets.settle(grant.tenant.slot, grant.tokens, grant.used, grant.month)

    def count_month(self, used: Mapping[str, int], month: int | None = None) -> None:
        """Set what tenants have used in a month (None: this one) as the receipts say, which outlive this process."""
        at = month_of(self._wall()) if month is None else month
        for name, tokens in used.items():
            if (tenant := self._by_name.get(name)) is not None:
                self._buckets.count_month(tenant.slot, at, tokens)

    def _refuse(self, tenant: Tenant, over: Over, cost: int) -> NoReturn:
        limits, retry = tenant.limits, None if math.isinf(over.wait_s) else max(math.ceil(over.wait_s), 1)
        code = "rate_limit_exceeded"
        if over.scope == "concurrent":
            message = f"{limits.concurrent:g} requests of yours are running, which is your limit (max_concurrent)"
        elif over.scope == "month":
            code, retry = "insufficient_quota", _until_next_month(self._wall())
            message = (
                f"{cost} tokens are more than is left of this month's {limits.month_tokens:.0f} (tokens_per_month)"
            )
        elif over.scope == "requests":
            message = f"{limits.requests_per_s * 60:.0f} requests a minute are your limit (requests_per_minute)"
        elif retry is None:
            message = (
                f"prompt and max_tokens come to {cost} tokens; your limit holds at most {limits.token_burst:.0f} at once"
                " (tokens_per_minute): ask for less"
            )
        else:
            message = f"{limits.tokens_per_s * 60:.0f} tokens a minute are your limit (tokens_per_minute), and this request asks for {cost}"
        raise ApiError(429, message, type=RATE_LIMIT, code=code, retry_after_s=retry)


def read(path: Path) -> TenantsFile:
    """Read a file of tenants. Raises ConfigError that names the file and the field."""
    try:
        return toml.decode(path.read_bytes(), TenantsFile)
    except OSError as error:
        raise ConfigError(f"gateway.tenants {str(path)!r}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}") from error


def new_key() -> tuple[str, str]:
    """Return a new key and what the file has of it."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, _HASH + hashlib.sha256(key.encode()).hexdigest()


def month_of(seconds: float) -> int:
    """Return the month (UTC) of a time in seconds since 1970, as `year * 12 + month - 1`."""
    moment = time.gmtime(seconds)
    return moment.tm_year * 12 + moment.tm_mon - 1


def duration(seconds: float) -> str:
    """Write a duration as OpenAI's headers do: `6m0s`, `1.5s`, `20ms`."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1_000)}ms"
    minutes, rest = divmod(round(seconds, 3), 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{minutes:.0f}m{text}" if minutes else text


def _key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the one key that the headers hold, as a bearer token or in `x-api-key`."""
    found: set[bytes] = set()
    for name, value in headers:
        if name == b"authorization":
            kind, _, key = value.partition(b" ")
            if kind.lower() != b"bearer":
                raise _denied("the Authorization header must be 'Bearer KEY'")
            found.add(key.strip())
        elif name == b"x-api-key":
            found.add(value.strip())
    if not found:
        raise _denied("give an API key: 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
    if len(found) > 1:
        raise _denied("the request has two API keys that are unlike; give one")
    key = found.pop()
    if not key or len(key) > _MAX_KEY:
        raise _denied("this API key is not known; ask the operator of this server for one")
    return key


def _denied(message: str) -> ApiError:
    return ApiError(401, message, type=AUTHENTICATION, code="invalid_api_key")


def _until_next_month(seconds: float) -> int:
    month = month_of(seconds) + 1
    return max(math.ceil(datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp() - seconds), 1)
