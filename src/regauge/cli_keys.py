"""The command line's verb `keys`: API keys of tenants. Heavy imports are in the verb."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable

from regauge.errors import ConfigError


def arguments(job: Callable[[str, str], argparse.ArgumentParser]) -> None:
    """Add the commands below the verb."""
    new = job("new", "make an API key for a tenant: shown once, kept nowhere")
    new.add_argument("tenant", metavar="NAME")


def run(options: argparse.Namespace) -> int:
    """Make a key; return the exit code. Raises ConfigError for a name that no tenant can have."""
    from regauge.serve.tenants import NAME, new_key

    if not NAME.fullmatch(options.tenant):
        raise ConfigError(
            f"tenant {options.tenant!r}: 1 to 64 letters, digits, '.', '_' or '-', the first of them no sign"
        )
    key, digest = new_key()
    if options.json:
        print(json.dumps({"tenant": options.tenant, "key": key, "hash": digest}, indent=2))
        return 0
    print(key)  # alone on standard output, so that it can go into a file or a store of secrets
    print("\nThe key is shown this once. For the file of gateway.tenants:\n", file=sys.stderr)
    name = options.tenant if "." not in options.tenant else f'"{options.tenant}"'
    print(f'[tenant.{name}]\nkeys = ["{digest}"]', file=sys.stderr)
    return 0
