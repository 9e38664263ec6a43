"""What every transport must do, and how it must end: the tests of shm and tcp, run over the libraries."""

from test_transport_contract import *  # noqa: F403
from test_transport_endings import *  # noqa: F403
