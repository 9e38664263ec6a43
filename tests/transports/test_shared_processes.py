"""Killed and frozen processes on either side: the tests of the careless library, run over the real ones."""

from test_library_processes import *  # noqa: F403
