"""A dump in which known numbers were written, among random bytes, tells how it is packed."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_engine import dump
from regauge.errors import LayoutError
from regauge.layout.dtypes import DTYPES
from regauge.layout.engines import from_engine_form
from regauge.layout.presets import attention_model, from_short, load_model
from regauge.layout.probe import pattern
from regauge.layout.probe.candidates import candidates
from regauge.layout.probe.codes import Bytes
from regauge.layout.probe.known import Known, load, read_dump
from regauge.layout.probe.search import Report, Search, regions_of
from regauge.layout.spec import Array, Layout, Model, Placement, State
from regauge.layout.validate import validate
from regauge.layout.view import check_memory
from regauge.plan import Side
from regauge.plan.reference import addresses, component_view
from strategies import FLOATS, layouts, models

MODEL = attention_model("m", 3, Array(2, 32))
DTYPES_SEARCHED = [name for name, d in DTYPES.items() if not d.opaque]


def short(text: str, pages: int = 7) -> Layout:
    return from_short(text, MODEL, pages=pages)


def known_for(layout: Layout, source: str = "bfloat16") -> Known:
    return Known.of(layout, pattern.make(layout, source=source, rounds=1))


def search(known: Known, regions: dict[str, Bytes], dtypes: list[str] | None = None, pages: int = 0) -> Report:
    dtypes = dtypes or DTYPES_SEARCHED
    nbytes = sum(data.size for data in regions.values())
    return Search(known, regions).run(candidates(known.layout, dtypes, nbytes=nbytes, pages=pages), dtypes)


def assert_same_places(found: Layout, true: Layout, known: Known) -> None:
    """Both layouts put every written element at the same byte of the same region."""
    for a, b, table, layers in zip(found.groups, true.groups, known.tables, known.layers, strict=True):
        tokens = np.arange(known.values[0]["k"].shape[1])
        for c in a.components:
            d = b.component(c.name)
            assert c.dtype == d.dtype
            places = []
            for group, component in ((a, c), (b, d)):
                view = component_view(group, component)
                names = [view.region.replace("{layer}", str(x)) for x in layers]
                side = Side(table, dict.fromkeys(names, 0))
                places.append((names, addresses(view, group, side, tokens, layers).tolist()))
            assert places[0] == places[1]


@pytest.mark.parametrize(
    "form",
    [
        "bf16,page=8", "bf16,page=8,hnd", "bf16,page=8,kt", "bf16,page=8,fused", "bf16,page=8,hnd,fused,page-first",
        "fp16,page=8,page-first", "fp32,page=8", "int8,page=8,fused", "fp8_e4m3fnuz,page=8,kt", "fp8_e5m2,page=8,hnd",
        "fp8_e4m3,page=8,scale=token_head", "int8,page=8,hnd,scale=token_head",
    ],
)  # fmt: skip
def test_every_short_form_is_found(form: str) -> None:
    true = short(form)
    report = search(known_for(true), dump(known_for(true), true))
    assert [h.exact for h in report.hits] == [True]
    assert check_memory(validate(report.hits[0].layout)).groups == true.groups


@pytest.mark.parametrize(
    ("form", "like"),
    [
        ("engine:sglang,pool=nhd,page=8,dtype=bf16", "bf16,page=8"),
        ("engine:sglang,pool=vectorized_5d,page=8,dtype=bf16", "bf16,page=8"),
        ("engine:sglang,pool=page_first,page=8,dtype=fp8_e5m2", "fp8_e5m2,page=8"),
        ("engine:sglang,pool=page_head,page=8,dtype=bf16", "bf16,page=8"),
        ("engine:vllm,pool=LBHNC,page=16,dtype=bfloat16", "bf16,page=16"),
        ("engine:vllm,pool=LHBNC,page=16,dtype=bfloat16", "bf16,page=16"),
        ("engine:vllm,pool=BHLNC,page=16,dtype=float16", "fp16,page=16"),
        ("engine:vllm,pool=cpu,page=32,dtype=auto,model-dtype=float16", "fp16,page=32"),
    ],
)
def test_engine_pools_are_found_and_named(form: str, like: str) -> None:
    true = from_engine_form(f"{form},pages=5", MODEL)
    known = known_for(short(like, pages=5))
    report = search(known, dump(known, true), pages=5)
    names = report.hits[0].names
    engine, pool = form.split(",")[:2]
    assert any(name.startswith(f"{engine},{pool},") for name in names), names
    assert report.hits[0].exact
    assert_same_places(report.hits[0].layout, true, known)


def test_a_rank_of_several() -> None:
    model = attention_model("m", 3, Array(4, 32))
    true = from_engine_form("engine:sglang,pool=hnd,page=8,dtype=bf16,tp=2,rank=1,pages=5", model)
    known = known_for(true)
    report = search(known, dump(known, true))
    assert any(name.startswith("engine:sglang,pool=hnd") for name in report.hits[0].names)
    assert report.hits[0].layout == true


def test_k_of_one_packing_and_v_of_another() -> None:
    like = short("bf16,page=8")
    group = like.groups[0]
    orders = ("page head dim token dim:8", "page token head dim")
    mixed = [
        msgspec.structs.replace(c, at=Placement(order, f"{c.name}.{{layer}}"))
        for c, order in zip(group.components, orders, strict=True)
    ]
    true = msgspec.structs.replace(like, groups=[msgspec.structs.replace(group, components=mixed)])
    known = known_for(like)
    report = search(known, dump(known, true))
    assert "k as" in report.hits[0].names[0]
    assert "lanes of 8" in report.hits[0].names[0]
    assert "; v as" in report.hits[0].names[0]
    assert_same_places(report.hits[0].layout, true, known)


def test_pages_that_are_further_apart_than_any_preset_says() -> None:
    like = short("fp16,page=8,hnd")
    group = like.groups[0]
    padded = [msgspec.structs.replace(c, at=msgspec.structs.replace(c.at, strides={"page": 1040}, offset=256))
              for c in group.components]  # fmt: skip
    true = msgspec.structs.replace(like, groups=[msgspec.structs.replace(group, components=padded)])
    known = known_for(like)
    report = search(known, dump(known, true))
    assert [h.exact for h in report.hits] == [False]
    assert any(name.startswith("float16,page=8,hnd") for name in report.hits[0].names)
    assert_same_places(report.hits[0].layout, true, known)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_even_layout_is_measured_where_no_packing_is_known(data: st.DataObject) -> None:
    model = data.draw(models().filter(lambda m: m.states[0].arrays["k"].dim >= 8))
    true = data.draw(layouts(model, FLOATS))
    known = Known.of(true, pattern.make(true, source="bfloat16", rounds=1))
    report = Search(known, dump(known, true)).run([], [true.groups[0].components[0].dtype])
    assert len(report.hits) == 1, report.measured
    assert_same_places(report.hits[0].layout, true, known)


def test_what_is_known_anyway() -> None:
    """Tokens that lie unevenly, as in a pool that leaves every third slot out: no layout says that, but some is known."""
    like = short("bf16,page=8")
    known = known_for(like)
    regions = dump(known, like)
    page = 8 * 2 * 32 * 2
    for data in regions.values():
        start = known.tables[0][0] * page
        data[start + page - 128 : start + page] = 0  # the last token of the first page is gone
    report = search(known, regions)
    assert report.hits == ()
    assert report.measured == (
        "k: bfloat16, token step uneven, head step 64 bytes, dim step 2 bytes",
        "v: bfloat16, token step uneven, head step 64 bytes, dim step 2 bytes",
    )


def test_no_trace_in_random_bytes() -> None:
    known = known_for(short("fp8,page=8"))
    regions = {"x": np.random.default_rng(0).integers(0, 256, 20_000, np.uint8)}
    report = search(known, regions, ["float8_e4m3fn", "bfloat16", "int8"])
    assert (report.hits, report.partial) == ((), ())
    assert report.measured == ("k: no trace in any dtype", "v: no trace in any dtype")


def test_a_dump_of_k_alone_explains_k() -> None:
    true = short("bf16,page=8,hnd")
    known = known_for(true)
    report = search(known, {"k": dump(known, true)["k"]})
    assert report.hits == ()
    assert report.partial[0].found == ("k",)
    assert report.partial[0].missing == ("v",)
    assert any("page=8,hnd" in p.name for p in report.partial)


def test_a_dump_that_begins_after_page_0() -> None:
    true = short("bf16,page=8")
    made = pattern.make(true, source="bfloat16", usable={0: [3, 4, 5]}, layers=[0], rounds=1)
    known = Known.of(true, made)
    page = 8 * 2 * 32 * 2
    regions = {name: data[3 * page : 7 * page] for name, data in dump(known, true).items()}
    report = search(known, regions)
    assert [h.exact for h in report.hits] == [False]
    assert report.hits[0].notes == tuple(f"the dump of {n} begins {3 * page} bytes after page 0 of {n}" for n in "kv")


# -- files ------------------------------------------------------------------------------------------------------------


def test_numbers_come_back_from_their_file(tmp_path: Path) -> None:
    known = known_for(short("fp8,page=8,scale=token_head"))
    known.save(tmp_path / "p.npz")
    again = load(tmp_path / "p.npz")
    assert again.layout == known.layout
    assert again.layers == known.layers
    assert [t.tolist() for t in again.tables] == [t.tolist() for t in known.tables]
    assert all(np.array_equal(again.values[0][n], v) for n, v in known.values[0].items())


def _save(path: Path, **arrays: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    known = known_for(short("bf16,page=8"))
    known.save(tmp_path / "p.npz")
    with np.load(tmp_path / "p.npz") as stored:
        good = {name: stored[name] for name in stored.files}
    with pytest.raises(LayoutError, match="no pattern file"):
        load(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_bytes(b"not a zip")
    with pytest.raises(LayoutError, match="no pattern file"):
        load(tmp_path / "text.npz")
    without = {n: a for n, a in good.items() if n != "0.v"}
    with pytest.raises(LayoutError, match=r"0\.v: expected float32 of 4 axes, found missing"):
        load(_save(tmp_path / "a.npz", **without))
    with pytest.raises(LayoutError, match="does not fit"):
        load(_save(tmp_path / "b.npz", **{**good, "0.k": good["0.k"][:, :, :1]}))
    with pytest.raises(LayoutError, match="layers or pages"):
        load(_save(tmp_path / "c.npz", **{**good, "0.layers": np.array([0, 1, 9], np.int64)}))
    pickled = io.BytesIO()
    np.savez(pickled, layout=np.array([{}], object))
    (tmp_path / "d.npz").write_bytes(pickled.getvalue())
    with pytest.raises(LayoutError, match="no pattern file"):
        load(tmp_path / "d.npz")
    for name in ("0.layers", "0.pages"):
        twice = good[name].copy()
        twice[1] = twice[0]
        with pytest.raises(LayoutError, match=r"0: a layer or page is given twice"):
            load(_save(tmp_path / "e.npz", **{**good, name: twice}))
    with zipfile.ZipFile(tmp_path / "f.npz", "w") as archive:
        archive.writestr("layout.npy", b"no array")
    with pytest.raises(LayoutError, match=r"layout: expected uint8 of 1 axes"):
        load(tmp_path / "f.npz")


def _zipped(member: bytes, kind: int = zipfile.ZIP_STORED) -> bytearray:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", kind) as archive:
        archive.writestr("layout.npy", member)
    return bytearray(out.getvalue())


def _headed(header: str) -> bytes:
    """An array file with this header, whatever it says."""
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)


@pytest.mark.parametrize("kind", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_file_with_corrupt_members_is_refused(tmp_path: Path, kind: int) -> None:
    rng = np.random.default_rng(kind)
    broken = _zipped(_headed(rng.integers(0, 100, 4000).tobytes().hex()), kind)
    broken[60:1000] = bytes(940)
    (tmp_path / "a.npz").write_bytes(broken)
    with pytest.raises(LayoutError, match="no pattern file"):
        load(tmp_path / "a.npz")


@pytest.mark.parametrize(("at", "value"), [(8, 1), (10, 77)], ids=["encrypted", "packed in an unknown way"])
def test_a_file_whose_members_cannot_be_unpacked_is_refused(tmp_path: Path, at: int, value: int) -> None:
    whole = _zipped(_headed("{}"))
    whole[whole.index(b"PK\x01\x02") + at] = value  # of the directory's entry
    (tmp_path / "a.npz").write_bytes(whole)
    with pytest.raises(LayoutError, match="no pattern file"):
        load(tmp_path / "a.npz")


@pytest.mark.parametrize(
    "header", ["{'a': (", f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({2**70},)}}\n"], ids=["open", "large"]
)
def test_arrays_with_headers_that_numpy_does_not_expect_are_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "a.npz").write_bytes(_zipped(_headed(header)))
    with pytest.raises(LayoutError, match="no pattern file"):
        load(tmp_path / "a.npz")
    (tmp_path / "a.npy").write_bytes(_headed(header))
    with pytest.raises(LayoutError, match="cannot be read"):
        read_dump(tmp_path / "a.npy")


def test_a_file_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regauge.layout.probe.known.MAX_FILE_BYTES", 1 << 20)
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("layout.npy", bytes(2 << 20))
    with pytest.raises(LayoutError, match="at most"):
        load(tmp_path / "bomb.npz")


def test_dumps_are_raw_or_npy_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = np.arange(12, dtype=np.uint16).reshape(3, 4)
    data.tofile(tmp_path / "raw.bin")
    np.save(tmp_path / "array.npy", data)
    for name in ("raw.bin", "array.npy"):
        assert read_dump(tmp_path / name).tobytes() == data.tobytes()
    with pytest.raises(LayoutError, match="cannot be read"):
        read_dump(tmp_path / "none")
    claims = (tmp_path / "array.npy").read_bytes().replace(b"(3, 4), ", b"(9**9,),")
    (tmp_path / "claims.npy").write_bytes(claims)
    with pytest.raises(LayoutError, match="cannot be read"):
        read_dump(tmp_path / "claims.npy")
    np.savez(tmp_path / "several.npz", data)
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    with pytest.raises(LayoutError, match="cannot be read"):
        read_dump(tmp_path / "several.npy")
    monkeypatch.setattr("regauge.layout.probe.known.MAX_DUMP_BYTES", 10)
    with pytest.raises(LayoutError, match="1 to 10"):
        read_dump(tmp_path / "raw.bin")
    with pytest.raises(LayoutError, match="two dumps are named"):
        regions_of([("k", np.zeros(1, np.uint8)), ("k", np.zeros(1, np.uint8))])


def test_packed_records_are_found_and_their_scales_with_them() -> None:
    """The 656-byte token of FP8 MLA and the indexer's pages of 132 bytes a token, as vLLM and SGLang write them."""
    whole = load_model("deepseek-v3.2")
    states = [msgspec.structs.replace(s, layers="0-1") for s in whole.states]
    model = msgspec.structs.replace(whole, num_layers=2, states=states)
    true = from_short("record:fp8_ds_mla,record:dsa_index,page=64", model, pages=4)
    known = known_for(true)
    report = search(known, dump(known, true), ["bfloat16", "float8_e4m3fn"])
    assert [h.exact for h in report.hits] == [True]
    assert any("record:fp8_ds_mla,record:dsa_index" in name for name in report.hits[0].names)
    found = {c.name: c for g in report.hits[0].layout.groups for c in g.components}
    assert found["latent"].scale is not None
    assert found["latent"].scale.at is not None
    assert (found["latent"].at.strides["token"], found["latent"].scale.at.offset, found["rope"].at.offset) == (
        656,
        512,
        528,
    )


def test_groups_with_records_beside_pages() -> None:
    arrays = {name: Array(2, 12) for name in ("conv_q", "conv_k", "conv_v")} | {"ssm_state": Array(4, 64)}
    states = [State("recurrent", "0,2", arrays), State("attention", "1,3", {"k": Array(2, 32), "v": Array(2, 32)})]
    true = from_short("bf16,page=8,hnd", Model("m", 4, states), pages=6, requests=3)
    known = known_for(true)
    report = search(known, dump(known, true), ["bfloat16"])
    assert report.hits[0].names == ("bfloat16,page=8,hnd,split,layer-first,scale=none",)
    assert report.hits[0].layout.groups == true.groups
