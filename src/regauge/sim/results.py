"""Runs on disk: a folder with `run.json` (scenario, versions, summaries) and one table per run, Parquet or CSV. Read back by `read`.

A table has the columns of `Log`, one row a request. Parquet keeps types and the not-a-number of what a request never reached; CSV writes that as an empty
field, and floats so that they are read back exactly.
"""

from __future__ import annotations

import csv
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from regauge import __version__
from regauge.errors import ConfigError
from regauge.sim.log import COLUMNS, Log
from regauge.sim.scenario import Scenario
from regauge.sim.summary import Pooled, Summary

Form = Literal["parquet", "csv"]
VERSION = 1
"""Of the form of `run.json`."""
RUN = "run.json"
NOTE = "simulated"
MAX_BYTES = 64 << 20
"""Of a `run.json` that is read."""


class Run(msgspec.Struct, frozen=True):
    """One case with one seed."""

    case: str
    seed: int
    summary: Summary
    events: dict[str, int]
    """What the simulator counted: decisions, events of the clock, ..."""
    table: str = ""
    """File in the same folder; empty: not kept."""


class Report(msgspec.Struct, frozen=True):
    """All that was run."""

    scenario: Scenario
    runs: list[Run]
    pooled: list[Pooled]
    trace: dict[str, Any]
    """What was replayed: name, requests, tokens of a block."""
    versions: dict[str, str]
    notes: list[str]
    """What the reader must know of the setup and the trace."""
    note: str = NOTE
    version: int = VERSION


def versions() -> dict[str, str]:
    """Return what the figures depend on, beside the scenario."""
    return {"regauge": __version__, "python": platform.python_version(), "numpy": np.__version__}


def encode(report: Report) -> bytes:
    """Return a report as indented JSON; numbers that are not finite become null, as JSON has none."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def save(folder: Path, report: Report, logs: Mapping[tuple[str, int], Log], form: Form) -> list[Path]:
    """Write a report and its runs' logs, by case and seed; return the files. Raises ConfigError where that cannot be."""
    written, runs = [], []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for run in report.runs:
            log = logs[run.case, run.seed]
            path = folder / f"{slug(run.case)}-seed{run.seed}.{form}"
            write(path, log)
            written.append(path)
            runs.append(msgspec.structs.replace(run, table=path.name))
        path = folder / RUN
        path.write_bytes(encode(msgspec.structs.replace(report, runs=runs)))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error
    return [*written, path]


def read(folder: Path) -> tuple[dict[str, Any], dict[tuple[str, int], Log]]:
    """Return a saved report as plain data, and its logs by case and seed. Raises ConfigError for what `save` did not write."""
    path = folder / RUN
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes; not written by `regauge sim`")
        told = msgspec.json.decode(path.read_bytes())
        if told["version"] != VERSION:
            raise ConfigError(f"{path}: form {told['version']}, this regauge reads {VERSION}; run the scenario again")
        tables = {(run["case"], run["seed"]): load(folder / Path(run["table"]).name) for run in told["runs"]}
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}; name a folder of --out") from error
    except (msgspec.DecodeError, LookupError, TypeError) as error:
        raise ConfigError(f"{path}: not written by `regauge sim`: {error}") from error
    return told, tables


def write(path: Path, log: Log) -> None:
    """Write one log as `.parquet` or `.csv`, by its ending. Raises ConfigError for another one, and for Parquet without pyarrow."""
    if path.suffix == ".csv":
        _write_csv(path, log)
    elif path.suffix == ".parquet":
        arrow, parquet = _pyarrow()
        table = arrow.table({name: getattr(log, name) for name in COLUMNS}, metadata={"regauge": NOTE})
        parquet.write_table(table, path)
    else:
        raise ConfigError(f"{path}: end it in .parquet or .csv")


def load(path: Path) -> Log:
    """Read one log back. Raises ConfigError with the line or column that is wrong, OSError for a file that is not there."""
    if path.suffix == ".csv":
        return _read_csv(path)
    arrow, parquet = _pyarrow()
    try:
        table = parquet.read_table(path, columns=list(COLUMNS))
    except arrow.ArrowException as error:
        raise ConfigError(f"{path}: not a table of a run: {error}") from error
    return Log(*(table[name].to_numpy().astype(_KINDS[name], copy=False) for name in COLUMNS))


def slug(case: str) -> str:
    """Return a case's name as a file's."""
    return re.sub(r"[^a-z0-9]+", "-", case.lower()).strip("-") or "run"


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("Parquet needs pyarrow: pip install 'regauge[plan]', or write CSV with --csv") from error
    return arrow, parquet


_KINDS: dict[str, type] = {
    **dict.fromkeys(COLUMNS, np.float64),
    **dict.fromkeys(("prompt", "cached", "output"), np.int64),
    **dict.fromkeys(("prefill", "decode", "attempts"), np.int16),
    "outcome": np.uint8,
}


def _write_csv(path: Path, log: Log) -> None:
    columns = [getattr(log, name).tolist() for name in COLUMNS]
    with path.open("w", newline="", encoding="ascii") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(COLUMNS)
        for row in zip(*columns, strict=True):
            out.writerow(["" if value != value else value for value in row])  # NaN alone is not itself


def _read_csv(path: Path) -> Log:
    values: dict[str, list[float]] = {name: [] for name in COLUMNS}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        rows = csv.reader(file)
        if next(rows, None) != list(COLUMNS):
            raise ConfigError(f"{path}:1: not the columns of a run: {', '.join(COLUMNS)}")
        for row in rows:
            try:
                for name, text in zip(COLUMNS, row, strict=True):
                    values[name].append(_number(name, text))
            except ValueError as error:
                raise ConfigError(f"{path}:{rows.line_num}: {error}") from error
    return Log(*(np.array(values[name]).astype(_KINDS[name]) for name in COLUMNS))


def _number(name: str, text: str) -> float:
    if _KINDS[name] is np.float64:
        return float(text) if text else np.nan
    value, kind = int(text), np.iinfo(_KINDS[name])
    if not kind.min <= value <= kind.max:
        raise ValueError(f"{name} {value} is not from {kind.min} to {kind.max}")
    return value
