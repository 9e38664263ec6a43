"""SQLite and PostgreSQL behind one small interface: statements with `?`, transactions in which one writer at a time writes, a schema version.

The SQL of the store is what both understand. A database's own errors become StoreError.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from regauge.errors import ConfigError, StoreError

BUSY_S: Final = 10.0
"""Most seconds to wait for another process that writes."""
_LOCK: Final = 0x7265_6761_7567_65
"""PostgreSQL's advisory lock that whoever writes receipts holds ("regauge")."""

MIGRATIONS: Final[tuple[tuple[str, ...], ...]] = (
    (
        """CREATE TABLE receipts (
            request TEXT NOT NULL, side TEXT NOT NULL, signer TEXT NOT NULL, ended_us BIGINT NOT NULL,
            received_us BIGINT NOT NULL, digest TEXT NOT NULL, body TEXT NOT NULL,
            PRIMARY KEY (request, side, digest))""",
        "CREATE INDEX receipts_signer ON receipts (signer, ended_us)",
        """CREATE TABLE entries (
            request TEXT PRIMARY KEY, status TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL,
            at_us BIGINT NOT NULL, ended_us BIGINT NOT NULL, prompt BIGINT NOT NULL, cached BIGINT NOT NULL,
            computed BIGINT NOT NULL, transferred BIGINT NOT NULL, converted BIGINT NOT NULL, generated BIGINT NOT NULL,
            direct_bytes BIGINT NOT NULL, remap_bytes BIGINT NOT NULL, convert_bytes BIGINT NOT NULL,
            charged_cached BIGINT NOT NULL, charged_uncached BIGINT NOT NULL, charged_output BIGINT NOT NULL,
            body TEXT NOT NULL)""",
        "CREATE INDEX entries_tenant ON entries (tenant, at_us)",
        "CREATE INDEX entries_at ON entries (at_us)",
        "CREATE INDEX entries_status ON entries (status, at_us)",
    ),
)
"""The statements that lead from each version of the schema to the next: append, never change."""


class Database(Protocol):
    """One connection, for one thread."""

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement; return its rows. Raises StoreError."""

    def stream(self, statement: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query without holding them all. Raises StoreError."""

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of it or nothing, durable at the end, with no other writer beside it. Raises StoreError."""

    def has(self, table: str) -> bool:
        """Say whether there is such a table. Raises StoreError."""

    def close(self) -> None:
        """Let go of the connection; what is not committed is gone."""


def is_postgres(url: str) -> bool:
    """Say whether a store's name is a PostgreSQL server's; else it is a file."""
    return url.startswith(("postgresql://", "postgres://"))


def connect(url: str, *, create: bool = True) -> Database:
    """Open a store: `postgresql://USER@HOST/NAME`, or a file for SQLite, and bring its schema up to date.

    `create`: false, for readers: nothing is made or changed. Raises StoreError (it cannot be opened, is not there, or was
    made by a newer regauge), ConfigError (psycopg is not installed).
    """
    database: Database = _postgres(url) if is_postgres(url) else _Sqlite(url, create=create)
    try:
        _migrate(database, shown(url), create=create)
    except BaseException:  # closed, whatever broke
        database.close()
        raise
    return database


def shown(url: str) -> str:
    """Return a store's name without the password in it."""
    head, at, tail = url.rpartition("@")
    if not is_postgres(url) or not at:
        return url
    scheme, _, user = head.partition("://")
    return f"{scheme}://{user.partition(':')[0]}@{tail}"


def _migrate(database: Database, name: str, *, create: bool) -> None:
    version = _version(database)
    if version > len(MIGRATIONS):
        raise StoreError(f"{name}: of schema {version}, made by a newer regauge; this one knows {len(MIGRATIONS)}")
    if version == len(MIGRATIONS):
        return
    if not create:
        what = f"is of schema {version}; a gateway of this version brings it up to date" if version else "is no store"
        raise StoreError(f"{name}: {what}")
    with database.transaction():
        version = _version(database)  # another process may have been faster
        if version == 0:
            database.execute("CREATE TABLE regauge_meter (version BIGINT NOT NULL)")
            database.execute("INSERT INTO regauge_meter VALUES (0)")
        for statements in MIGRATIONS[version:]:
            for statement in statements:
                database.execute(statement)
        database.execute("UPDATE regauge_meter SET version = ?", (max(version, len(MIGRATIONS)),))


def _version(database: Database) -> int:
    if not database.has("regauge_meter"):
        return 0
    return int(database.execute("SELECT version FROM regauge_meter")[0][0])


class _Sqlite:
    """A file; write-ahead log, and each commit on the disk before it is one."""

    def __init__(self, path: str, *, create: bool) -> None:
        if not create and not Path(path).is_file():
            raise StoreError(f"{path}: no such file")
        try:
            self._raw = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        except sqlite3.Error as error:
            raise StoreError(f"{path}: {error}") from error
        try:
            if create:
                self.execute("PRAGMA journal_mode = WAL")
            self.execute("PRAGMA synchronous = FULL")
        except StoreError as error:
            self.close()
            raise StoreError(f"{path}: {error}") from error

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return list(self.stream(statement, values))

    def stream(self, statement: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._raw.execute(statement, values)
        except sqlite3.Error as error:
            raise StoreError(f"SQLite: {error}") from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        self.execute("BEGIN IMMEDIATE")
        try:
            yield
            self.execute("COMMIT")
        except BaseException:  # undone, whatever broke
            if self._raw.in_transaction:
                self.execute("ROLLBACK")
            raise

    def has(self, table: str) -> bool:
        return bool(self.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)))

    def close(self) -> None:
        self._raw.close()


def _postgres(url: str) -> Database:
    try:
        import psycopg
    except ImportError as error:
        raise ConfigError("a store in PostgreSQL needs psycopg: pip install 'regauge[postgres]'") from error
    return _Postgres(psycopg, url)


class _Postgres:
    """A server, by psycopg 3."""

    def __init__(self, psycopg: Any, url: str) -> None:
        self._error: type[Exception] = psycopg.Error
        self._count = 0
        try:
            self._raw = psycopg.connect(url, autocommit=True, connect_timeout=int(BUSY_S), application_name="regauge")
        except self._error as error:
            raise StoreError(f"{shown(url)}: {str(error).strip()}") from error

    def execute(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        try:
            cursor = self._raw.execute(statement.replace("?", "%s"), values)
            return list(cursor) if cursor.description else []
        except self._error as error:
            raise StoreError(f"PostgreSQL: {str(error).strip()}") from error

    def stream(self, statement: str, values: Sequence[Any] = ()) -> Iterator[tuple[Any, ...]]:
        self._count += 1
        try:
            with self._raw.transaction(), self._raw.cursor(name=f"rows_{self._count}") as cursor:  # kept on the server
                cursor.execute(statement.replace("?", "%s"), values)
                yield from cursor
        except self._error as error:
            raise StoreError(f"PostgreSQL: {str(error).strip()}") from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        try:
            with self._raw.transaction():
                self.execute("SELECT set_config('lock_timeout', ?, true)", (f"{BUSY_S:g}s",))
                self.execute("SELECT pg_advisory_xact_lock(?)", (_LOCK,))
                yield
        except self._error as error:
            raise StoreError(f"PostgreSQL: {str(error).strip()}") from error

    def has(self, table: str) -> bool:
        return bool(self.execute("SELECT 1 WHERE to_regclass(?) IS NOT NULL", (table,)))

    def close(self) -> None:
        self._raw.close()
