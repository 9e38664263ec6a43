"""A PostgreSQL server of our own, from the system's programs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from itertools import count
from pathlib import Path


class Server:
    """A cluster in a folder, reached by its socket there. PostgreSQL refuses to run as root: then the package's user runs it."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self.folder = Path(tempfile.mkdtemp(prefix="regauge-postgres-"))
        self._numbers = count()
        self._as: list[str] = []
        if os.getuid() == 0:
            shutil.chown(self.folder, "postgres")
            self._as = ["runuser", "-u", "postgres", "--"]
        self._run("initdb", "--pgdata", str(self.folder / "data"), "--auth=trust", "--username=postgres", "--no-sync")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        log, options = str(self.folder / "log"), f"-k {self.folder} -c listen_addresses="
        self._run(
            "pg_ctl", "start", "--pgdata", str(self.folder / "data"), "--log", log, "--wait", "--options", options
        )

    def stop(self) -> None:
        """End it; its clients' connections break."""
        self._run("pg_ctl", "stop", "--pgdata", str(self.folder / "data"), "--wait", "--mode", "fast")

    def url(self) -> str:
        """Make an empty database; return its name."""
        name = f"meter{next(self._numbers)}"
        self._run("createdb", "--host", str(self.folder), "--username=postgres", name)
        return f"postgresql://postgres@/{name}?host={self.folder}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self._programs / program), *arguments]
        done = subprocess.run(
            command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/", timeout=60
        )
        assert done.returncode == 0, f"{program}: {done.stderr}"
