"""The command line's verb `serve`: its options, the configuration that they make, and the deployment. Heavy imports are in the functions."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from regauge.errors import ConfigError

if TYPE_CHECKING:
    from regauge.config import ServeConfig


def arguments(serve: argparse.ArgumentParser, layout_help: str) -> None:
    """Add the options of `regauge serve`."""
    serve.add_argument("--config", metavar="FILE", help="TOML file; the other options override it")
    serve.add_argument("--model", help="the bundled model's name, a Hugging Face folder, or a hub name")
    serve.add_argument(
        "--engine",
        choices=("local", "external"),
        help="external: start no workers, and serve with those that the file tells of",
    )
    serve.add_argument("--host", help="address of the HTTP endpoint")
    serve.add_argument("--port", type=int, help="port of the HTTP endpoint")
    serve.add_argument("--prefill-layout", help=layout_help)
    serve.add_argument("--decode-layout", help=layout_help)
    serve.add_argument("--transport", choices=("shm", "tcp", "mooncake", "nixl"), help="how KV crosses")
    _common(serve)


def worker_arguments(worker: argparse.ArgumentParser) -> None:
    """Add the options of `regauge worker`."""
    worker.add_argument("--role", required=True, choices=("prefill", "decode"), help="what the workers do")
    worker.add_argument(
        "--config", metavar="FILE", help="TOML file, as of `regauge serve`; the other options override it"
    )
    worker.add_argument(
        "--name", help="name of the worker, and what names of several begin with; default: role and host name"
    )
    worker.add_argument("--workers", type=int, metavar="N", help="how many; default: as the file says")
    worker.add_argument("--model", help="the bundled model's name, a Hugging Face folder, or a hub name")
    worker.add_argument("--transport", choices=("shm", "tcp", "mooncake", "nixl"), help="how KV crosses")
    _common(worker)


def _common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="any field of the file, as in decode.max_batch=8",
    )
    verb.add_argument("--log-json", action="store_true", help="one JSON object per log line")


def serve_config(options: argparse.Namespace) -> ServeConfig:
    """Merge file, options and `--set`. Raises ConfigError that names the field."""
    from pathlib import Path

    import msgspec

    from regauge.config import ServeConfig, load

    plain: dict[str, Any] = msgspec.to_builtins(load(Path(options.config)) if options.config else ServeConfig())
    for name in ("model", "host", "port", "prefill_layout", "decode_layout"):
        if getattr(options, name, None) is not None:
            plain[name] = getattr(options, name)
    if getattr(options, "engine", None) is not None:
        plain["external"] = options.engine == "external"
    if options.transport is not None:
        plain["transfer"]["transport"] = options.transport
    for item in options.set:
        key, equals, value = item.partition("=")
        *parents, last = key.split(".")
        target = plain
        for step in parents:
            target = target.get(step, {})
            if not isinstance(target, dict):
                break
        if not equals or not isinstance(target, dict) or last not in target or isinstance(target[last], dict):
            raise ConfigError(f"--set {item}: give a field of the configuration, as in decode.max_batch=8")
        target[last] = value
    try:
        return msgspec.convert(plain, ServeConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def run(options: argparse.Namespace) -> int:
    """Serve until a signal; return the exit code. Raises ConfigError, Refused, LayoutError, EngineError."""
    import asyncio

    config = serve_config(options)
    if not config.external:
        need_engine()
    from regauge.planes import enforced
    from regauge.serve.supervisor import Supervisor, describe, plan_deployment

    deployment = plan_deployment(config, _say)
    _say(describe(deployment))

    async def run() -> int:
        return await Supervisor(
            deployment, _say, log_json=options.log_json, reread=lambda: enforced(serve_config(options))
        ).run()

    return asyncio.run(run())


def run_worker(options: argparse.Namespace) -> int:
    """Run workers until a signal; return the exit code. Raises ConfigError, LayoutError, EngineError."""
    import asyncio
    import re
    import socket

    config = serve_config(options)
    need_engine()
    from regauge.serve.supervisor import Supervisor
    from regauge.serve.worker_host import plan_workers

    name = options.name or f"{options.role}-{re.sub('[^A-Za-z0-9._-]', '-', socket.gethostname())}"
    deployment = plan_workers(config, options.role, name, _say, options.workers)

    async def run() -> int:
        return await Supervisor(deployment, _say, log_json=options.log_json).run()

    return asyncio.run(run())


def _say(text: str) -> None:
    print(text, flush=True)


def need_engine() -> None:
    """Raise ConfigError where the embedded engine's packages are not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the embedded engine needs {' and '.join(missing)}: pip install 'regauge[local]'")
