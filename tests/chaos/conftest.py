"""Deployments are started as the tests of `serve` start them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "serve"))
