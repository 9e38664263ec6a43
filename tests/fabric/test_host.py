"""What the doctor reads a host by: this machine, a tree that looks like one, and a record of either."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regauge.errors import ConfigError
from regauge.fabric.host import Live, Record, Recorded, Recorder, decoded, load, number, rows, save


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    net = tmp_path / "sys/class/net/cmp0"
    net.mkdir(parents=True)
    (net / "mtu").write_text("9000\n")
    (net / "binary").write_bytes(b"\xff\xfe")
    (net / "device").symlink_to("../../../devices/pci0000:17/0000:18:00.0")
    return tmp_path


def test_files_folders_and_links_of_a_tree(tree: Path) -> None:
    host = Live(tree)
    assert host.read("/sys/class/net/cmp0/mtu") == "9000"
    assert host.read("/sys/class/net/cmp0/binary") == "��"
    assert host.names("/sys/class/net") == ["cmp0"]
    assert host.target("/sys/class/net/cmp0/device") == "0000:18:00.0"


def test_what_is_not_there_is_none(tree: Path) -> None:
    host = Live(tree)
    assert host.read("/sys/class/net/cmp0") is None
    assert host.read("/sys/nothing") is None
    assert host.names("/sys/nothing") is None
    assert host.target("/sys/class/net/cmp0/mtu") is None


def test_tools_print_or_are_not_there() -> None:
    host = Live()
    assert host.run("echo", "a b") == "a b"
    assert host.run("false") is None
    assert host.run("no-such-tool") is None


def test_a_record_answers_as_the_host_did(tree: Path, tmp_path: Path) -> None:
    recorder = Recorder(Live(tree))
    asked = ("/sys/class/net/cmp0/mtu", "/sys/nothing")
    before = [recorder.read(path) for path in asked], recorder.names("/sys/class/net"), recorder.run("echo", "x")
    before_link = recorder.target("/sys/class/net/cmp0/device")
    save(tmp_path / "host.json", recorder.record)
    again = load(tmp_path / "host.json")
    assert ([again.read(path) for path in asked], again.names("/sys/class/net"), again.run("echo", "x")) == before
    assert again.target("/sys/class/net/cmp0/device") == before_link
    assert again.read("/sys/never/asked") is None


@given(st.dictionaries(st.text(), st.none() | st.text()), st.dictionaries(st.text(), st.none() | st.lists(st.text())))
def test_any_record_comes_back(files: dict[str, str | None], folders: dict[str, list[str] | None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record = Record(files=files, folders=folders)
        save(Path(folder) / "r", record)
        assert load(Path(folder) / "r").record == record


@pytest.mark.parametrize(
    ("text", "said"), [("{", "no record of a host"), ('{"keys": {}}', "unknown field"), ("[]", "no record")]
)
def test_a_file_that_is_no_record_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "r").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load(tmp_path / "r")
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "none")


def test_numbers_and_json_of_tools() -> None:
    assert [number(each) for each in ("9000", "0x1003", "", "many", None)] == [9000, 0x1003, None, None, None]
    assert decoded("[") is None
    assert decoded(None) is None
    assert rows(decoded('[{"a": 1}, 2]')) == [{"a": 1}]
    assert rows({"a": 1}) == []


def test_recorded_is_what_tests_are_made_of() -> None:
    host = Recorded(Record(files={"/a": "1"}, commands={"ip -j route": "[]"}))
    assert (host.read("/a"), host.run("ip", "-j", "route"), host.names("/")) == ("1", "[]", None)


def test_a_recorder_asks_each_thing_once(tree: Path) -> None:
    recorder = Recorder(Live(tree))
    mtu = "/sys/class/net/cmp0/mtu"
    assert recorder.read(mtu) == "9000"
    (tree / mtu.lstrip("/")).write_text("1500")
    assert recorder.read(mtu) == "9000", "one look at the host, whoever asks"
