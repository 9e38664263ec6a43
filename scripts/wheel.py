"""Prints what an extra of pyproject.toml asks for, with its version: `wheel.py EXTRA`."""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
print(*project["optional-dependencies"][sys.argv[1]])
