"""Reading a model's `config.json`: where it comes from, and its values by type. A wrong one is named by its key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from regauge.errors import PresetError

MAX_INTEGER = 1 << 24


@dataclass(frozen=True, slots=True)
class Config:
    """A JSON object of a config. A key that is missing and one that is null are the same: None, or the default."""

    values: Mapping[str, Any]
    path: str = "config"

    def get(self, key: str) -> Any:
        """Return a value as it is."""
        return self.values.get(key)

    def first(self, *keys: str) -> str | None:
        """Return the first of these keys whose value says something: not null, 0, false or empty."""
        return next((key for key in keys if self.get(key)), None)

    def error(self, key: str, message: str) -> PresetError:
        """Return the error that names a key."""
        return PresetError(message, path=f"{self.path}.{key}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_INTEGER) -> int:
        """Return an integer. Raises PresetError for another value, and for none without a default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            what = "a positive integer" if least == 1 else f"an integer from {least} on"
            raise self.error(key, f"expected {what}, found {value!r}")
        return value

    def number(self, key: str, *, most: float = 2.0**127) -> float | None:
        """Return a positive number, None where there is none. Raises PresetError for another value."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
            limit = f" up to {most:g}" if most < 2.0**127 else ""
            raise self.error(key, f"expected a positive number{limit}, found {value!r}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false. Raises PresetError for another value."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, f"expected true or false, found {value!r}")
        return default if value is None else value

    def items(self, key: str) -> list[Any]:
        """Return a list, an empty one where there is none. Raises PresetError for another value."""
        value = self.get(key)
        if value is not None and not isinstance(value, list):
            raise self.error(key, f"expected a list, found {value!r}")
        return value or []

    def each(self, key: str, layers: int) -> list[Any]:
        """Return a list, or text, with one entry for each layer. Raises PresetError for another value."""
        value = self.get(key)
        if not isinstance(value, list | str) or len(value) != layers:
            raise self.error(key, f"expected one entry for each of {layers} layers")
        return list(value)

    def mapping(self, key: str) -> Config:
        """Return an object. Raises PresetError for another value."""
        value = self.get(key)
        if not isinstance(value, Mapping):
            raise self.error(key, f"expected an object, found {value!r}")
        return Config(value, f"{self.path}.{key}")

    def rest(self, used: Iterable[str]) -> dict[str, Any]:
        """Return the values of all other keys."""
        return {key: value for key, value in self.values.items() if key not in used}


def language_model(config: Mapping[str, Any]) -> Config:
    """Return the language model's part of a config."""
    part = config.get("text_config")
    return Config(part if isinstance(part, Mapping) else config)


def shipped_models() -> list[str]:
    """Return the names of the models whose geometry comes with the package (sources: `configs/SOURCES.md`)."""
    folder = resources.files("regauge.layout") / "configs"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


def read_config(source: str) -> tuple[dict[str, Any], str]:
    """Return the config and name of the model of a Hugging Face folder, a config.json, or a shipped name.

    Raises PresetError if it is none of them, or no JSON object.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        name = path.resolve().parent.name
    elif source in shipped_models():
        name = source
    else:
        raise PresetError(
            f"{source!r} is no folder with a config.json and no shipped model; shipped are {', '.join(shipped_models())}",
            path="model")  # fmt: skip
    try:
        file = path if path.is_file() else resources.files("regauge.layout") / "configs" / f"{source}.json"
        config = json.loads(file.read_bytes())
    except OSError as error:
        raise PresetError(f"{path} cannot be read: {error.strerror}", path="model") from error
    except (ValueError, RecursionError) as error:
        raise PresetError(f"{path} is not JSON: {error}", path="model") from error
    if not isinstance(config, dict):
        raise PresetError(f"{path} is not a JSON object", path="model")
    return config, name
