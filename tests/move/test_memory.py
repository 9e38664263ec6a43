import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from regauge.errors import TransportError
from regauge.move.memory import Slab, attach, available_bytes


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_slab_is_whole_pages_of_zeroed_writable_memory() -> None:
    with Slab(5000, "pool") as slab:
        assert slab.nbytes == 2 * mmap.PAGESIZE
        assert slab.address % mmap.PAGESIZE == 0
        assert slab.array.shape == (slab.nbytes,)
        assert slab.array.ctypes.data == slab.address
        assert not slab.array.any()
        slab.array[:] = 7


def test_it_is_faulted_in_from_the_start() -> None:
    before = resident_kib()
    with Slab(32 << 20) as slab:
        assert resident_kib() - before >= 30 << 10
        assert not slab.closed


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def test_a_peer_that_attaches_sees_the_same_bytes_and_outlives_the_owner() -> None:
    slab = Slab(1 << 16, "pool")
    peer = attach(slab.fd, slab.nbytes, "theirs")
    slab.array[100:104] = (1, 2, 3, 4)
    assert list(peer.array[100:104]) == [1, 2, 3, 4]
    assert peer.address != slab.address
    slab.close()
    peer.array[100] = 9
    assert peer.array[100] == 9
    peer.close()


def test_closing_twice_is_fine_and_use_afterwards_is_an_error() -> None:
    slab = Slab(1, "pool")
    slab.close()
    slab.close()
    assert slab.closed
    with pytest.raises(TransportError, match="'pool' is closed"):
        _ = slab.array
    with pytest.raises(TransportError, match="'pool' is closed"):
        _ = slab.fd


def test_a_view_keeps_the_memory_mapped_after_close() -> None:
    slab = Slab(1 << 20)
    view = slab.array[10:20]
    slab.close()
    view[:] = 5
    assert view.sum() == 50


def test_nothing_stays_open() -> None:
    before = open_files()
    for _ in range(20):
        with Slab(1 << 16) as slab, attach(slab.fd, slab.nbytes):
            pass
    assert open_files() == before


def test_a_forgotten_slab_warns() -> None:
    slabs = [Slab(1, "forgotten")]
    with pytest.warns(ResourceWarning, match="'forgotten' was never closed"):
        slabs.clear()


def test_memory_that_is_not_to_be_had_is_a_clear_error() -> None:
    with pytest.raises(TransportError, match=r"slab 'huge': \d+ bytes asked for, \d+ available"):
        Slab(available_bytes() * 4, "huge")
    with pytest.raises(ValueError, match="at least one"):
        Slab(0)


def test_attach_refuses_what_its_owner_could_shrink(tmp_path: Path) -> None:
    fd = os.memfd_create("loose")
    os.truncate(fd, 1 << 16)
    with pytest.raises(TransportError, match="cannot attach"):
        attach(fd, 1 << 16)
    os.close(fd)
    with (tmp_path / "file").open("wb") as file, pytest.raises(TransportError, match="not a memory segment"):
        attach(file.fileno(), 4096)
    with (
        Slab(4096) as slab,
        pytest.raises(TransportError, match="8192 bytes asked for; the segment has 4096"),
    ):
        attach(slab.fd, 8192)


def test_the_size_is_sealed() -> None:
    with Slab(1 << 16) as slab, pytest.raises(PermissionError):
        os.truncate(slab.fd, 4096)


def test_child_programs_do_not_inherit_it() -> None:
    with Slab(4096) as slab:
        code = f"import os\ntry: os.fstat({slab.fd})\nexcept OSError: print('gone')"
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, close_fds=False)
        assert out.stdout.strip() == "gone"
        assert np.all(slab.array == 0)
