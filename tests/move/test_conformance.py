"""A sample of the conformance suite, and that the suite can fail."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from regauge.cli import main
from regauge.errors import ConfigError, LayoutError, Refused
from regauge.layout.files import encode
from regauge.layout.presets import attention_model, from_short, load_model
from regauge.layout.spec import Array, Layout, Model, Shard, State, with_components
from regauge.layout.view import check_memory
from regauge.move.conformance import catalogue, matrix, mutations
from regauge.move.conformance.pools import LENGTH, PREFIX, element_addresses, generator, random_pool, tokens_of, whole
from regauge.move.conformance.refusals import causes
from regauge.move.conformance.suite import MAX_MOVED, Outcome, first_difference, run_pair, source, unfounded
from regauge.plan.check import Refusal, check
from regauge.plan.ranks import crossings
from regauge.plan.reference import load

MODEL = attention_model("m", 2, Array(2, 8))
SAMPLE = 56


def test_a_sample_of_all_pairs() -> None:
    """The whole is `regauge bench conformance`; docs/conformance.md has its figures."""
    outcomes = matrix.run(matrix.pairs(SAMPLE, seed=1))
    assert not matrix.faults(outcomes), matrix.table(outcomes)
    assert len(outcomes) == SAMPLE
    assert {o.path for o in outcomes} == set(matrix.PATHS)
    assert {way for o in outcomes for way in o.ways} == {"fused", "portable", "staged", "pieces"}


def test_the_catalogue_is_broad() -> None:
    sides = {entry.name: catalogue.build(entry) for entry in catalogue.entries()}
    assert len(sides) == len(catalogue.entries()) >= 100
    kinds = {g.kind for ranks in sides.values() for g in ranks[0].groups}
    assert kinds == {"attention", "window", "latent", "indexer", "recurrent"}
    dtypes = {c.dtype for ranks in sides.values() for g in ranks[0].groups for c in g.components}
    assert dtypes >= {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "int8"}
    shards = [ranks[0].shard for ranks in sides.values()]
    assert {s.tp_size for s in shards} >= {1, 2, 3, 4, 8}
    assert max(s.cp_size for s in shards) == 4
    assert max(s.pp_size for s in shards) == 2


def test_geometry_is_the_models_own() -> None:
    whole, cut = load_model("gpt-oss-20b"), catalogue.shortened(load_model("gpt-oss-20b"), 4)
    assert [s.layers for s in cut.states] == ["0,2", "1,3"]
    assert [(s.kind, s.arrays, s.window, s.rope) for s in cut.states] == [
        (s.kind, s.arrays, s.window, s.rope) for s in whole.states
    ]


@pytest.mark.parametrize("form", ["engine:vllm,pool=LBHNC,tp=0", "bf16,tp=many", "engine:vllm,pool=LBHNC,pp=3", "b16"])
def test_a_form_that_is_wrong_is_named(form: str) -> None:
    with pytest.raises(LayoutError, match=r"tp: |pp: 3 stages|cannot read 'b16'"):
        catalogue.all_ranks(form, MODEL, "bfloat16")


# -- the suite can fail ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mutations.names())
def test_a_mistake_is_noticed(name: str) -> None:
    assert mutations.tried(name) == ("", "")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("two pages exchanged", {"path": "DIRECT"}),
        ("two pages exchanged", {"path": "DIRECT", "fault": "fused: prefill: the page table names page 5 of 4"}),
        ("two pages exchanged", {"path": "REFUSED", "cause": "another model"}),
        ("two pages exchanged", {"path": "REFUSED", "fault": "not planned: expected something else"}),
        ("keys told as not rotated", {"path": "REFUSED", "cause": "another model"}),
        ("keys told as not rotated", {"path": "REMAP", "fault": "fused: decode rank 0, k: expected 1, got 2"}),
    ],
)
def test_an_exception_or_another_refusal_is_no_notice(name: str, found: dict[str, str]) -> None:
    assert mutations.missed(name, Outcome("a", "b", **found))  # type: ignore[arg-type]


def two(prefill: str = "bf16", decode: str = "fp8_e4m3,scale=token_head") -> tuple[list[Layout], list[Layout]]:
    return [from_short(prefill, MODEL)], [from_short(decode, MODEL)]


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("element", "attention k, layer 1, token 172, head 0, dim 7: expected"),
        ("scale", "attention scale of v, layer 0, token 37, head 1, block 0: expected"),
        ("outside", "byte 3 of region v, in which no element of the transfer lies, was written"),
    ],
)
def test_the_first_wrong_element_is_named(what: str, found: str) -> None:
    a, b = two()
    from_ = source("a", a, 0)
    want = random_pool(b[0], generator(0, "b"), decode=True)
    assert check(a[0], b[0]).path == "CONVERT"
    got = want.copy()
    group = want.layout.groups[0]
    if what == "outside":
        free = next(p for p in range(group.pages) if p not in want.tables[0][0])
        got.memory[want.bases["v"] + 3 + free * group.page_size * 2 * 8] ^= 1
        found = found.replace("byte 3", f"byte {3 + free * group.page_size * 2 * 8}")
    else:
        component = group.components[int(what == "scale")]
        where, _ = element_addresses(got, 0, component, scales=what == "scale")
        at = where[0, 0, 1, 0] if what == "scale" else where[1, -1, 0, 7]
        # Neither is a NaN, as which any other would do.
        want.memory[at], got.memory[at] = 1, 2
    pairs = crossings(from_.told, [want.layout])
    assert found in first_difference([got], [want], pairs)
    assert first_difference([want], [want], pairs) == ""


def test_a_converted_nan_may_have_another_payload_and_a_moved_one_may_not() -> None:
    for decode, fault in (("fp32", False), ("bf16,page=8", True)):
        a, b = two(decode=decode)
        pairs = crossings(source("a", a, 0).told, [random_pool(b[0], generator(0, "b"), decode=True).layout])
        want = random_pool(b[0], generator(0, "b"), decode=True)
        where, _ = element_addresses(want, 0, want.layout.groups[0].components[0])
        size = 4 if decode == "fp32" else 2
        at = where[0, 0, 0, 0] + np.arange(size)
        want.memory[at] = [1, *[0] * (size - 3), 0xC0, 0x7F] if size > 2 else [0xC1, 0x7F]
        got = want.copy()
        got.memory[at[0]] ^= 6
        assert np.isnan(load(got.memory, at[:1], want.layout.groups[0].components[0].dtype).astype(np.float32)).all()
        assert bool(first_difference([got], [want], pairs)) == fault


# -- refusals ----------------------------------------------------------------------------------------------------------


def renamed(layout: Layout, **changes: object) -> Layout:
    return msgspec.structs.replace(layout, model=msgspec.structs.replace(layout.model, **changes))


def opaque(layout: Layout) -> Layout:
    return with_components(layout, lambda c: msgspec.structs.replace(c, dtype="float4_e2m1fn_x2"))


BF16, BLOCKS, ROWS = (
    from_short(form, MODEL) for form in ("bf16", "fp8_e4m3,scale=block,block=4", "fp8_e4m3,scale=token_head")
)


@pytest.mark.parametrize(
    ("prefill", "decode", "cause"),
    [
        (BF16, renamed(BF16, name="n"), "another model"),
        (renamed(BF16, revision="1"), renamed(BF16, revision="2"), "another revision"),
        (BF16, from_short("bf16", attention_model("m", 2, Array(4, 8))), "the same name for another model"),
        (opaque(BF16), BF16, "a format that is moved only"),
        (BF16, opaque(BF16), "a format that is moved only"),
        (BLOCKS, ROWS, "a new scale over several old ones"),
        (msgspec.structs.replace(BF16, groups=[msgspec.structs.replace(BF16.groups[0], layers="0")]), BF16,
         "prefill lacks a state"),
        (BF16, msgspec.structs.replace(BF16, groups=[msgspec.structs.replace(BF16.groups[0], layers="1")]),
         "decode lacks a state"),
    ],
)  # fmt: skip
def test_a_refusal_has_its_cause_and_says_enough(prefill: Layout, decode: Layout, cause: str) -> None:
    assert causes([prefill], [decode]) == (cause,)
    outcome = run_pair(source("a", [prefill], 0), "b", [decode], 0)
    assert (outcome.path, outcome.cause, outcome.fault) == ("REFUSED", cause, "")
    for refusal in check(prefill, decode).refusals:
        assert unfounded([refusal], Refused((str(refusal),)), cause) == ""


@pytest.mark.parametrize(
    ("prefill", "decode"), [(BF16, BLOCKS), (ROWS, BLOCKS), (opaque(BF16), opaque(BF16)), (BF16, BF16)]
)
def test_what_can_be_carried_has_no_cause(prefill: Layout, decode: Layout) -> None:
    assert causes([prefill], [decode]) == ()
    assert run_pair(source("a", [prefill], 0), "b", [decode], 0).fault == ""


def test_a_refusal_without_cause_or_too_short_is_a_fault() -> None:
    refused = Refused(("no",))
    assert "without cause" in unfounded([], refused, "")
    assert "too little" in unfounded([Refusal("model.name", "a", "b", "")], refused, "another model")
    assert "the same" in unfounded([Refusal("model.name", "a", "a", "Change it.")], refused, "another model")
    assert unfounded([Refusal("model.name", "a", "b", "Change it.")], refused, "another model") == ""


# -- the request -------------------------------------------------------------------------------------------------------


def test_windows_are_shorter_than_the_request_and_records_are_whole() -> None:
    model = Model(
        "m", 2,
        [State("window", "0", {"k": Array(1, 4), "v": Array(1, 4)}, window=100),
         State("recurrent", "1", {"ssm_state": Array(2, 4)})])  # fmt: skip
    layout = from_short("bf16", model)
    window, recurrent = layout.groups
    assert tokens_of(layout, window, PREFIX) == (LENGTH - 100, LENGTH)
    assert tokens_of(layout, recurrent, PREFIX) == (0, 1)
    pool = random_pool(layout, generator(0, "m"), decode=False)
    table, origin = pool.tables[0]
    assert origin == 0
    gone = (LENGTH - 100) // 16
    assert not table[:gone].any()
    assert table[gone:].all()


# -- many pairs, and the command ---------------------------------------------------------------------------------------


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    everything = len(catalogue.entries())
    assert matrix.pairs(20, seed=3) == matrix.pairs(20, seed=3) != matrix.pairs(20, seed=4)
    assert len(matrix.pairs()) == everything**2
    for wrong in (0, everything**2 + 1):
        with pytest.raises(ConfigError, match=f"--sample {wrong}: give a number of pairs from 1 to {everything**2}"):
            matrix.pairs(wrong)


@pytest.mark.parametrize("sample", [1, 2, 56, 5000, 11_000])
def test_a_sample_has_as_many_pairs_as_are_asked_for(sample: int) -> None:
    models = [entry.model for entry in catalogue.entries()]
    chosen = matrix.pairs(sample)
    assert len(set(chosen)) == len(chosen) == sample
    if sample == 56:
        assert sum(models[i] == models[j] for i, j in chosen) == 42


def test_pieces_are_no_way_where_they_are_too_many() -> None:
    """A pair of elements that change places one by one: a kernel would take them, which is another way already."""
    model = attention_model("m", 2, Array(2, 256))
    few, many = (from_short(form, model) for form in ("bf16,page=16", "bf16,page=16,kt"))
    ways = [run_pair(source("a", [few], 0), "b", [to], 0).ways for to in (few, many)]
    assert LENGTH - PREFIX < MAX_MOVED < (LENGTH - PREFIX) * 2 * 2 * 256
    assert ways == [("fused", "portable", "staged", "pieces"), ("fused", "portable", "staged")]


def test_constant_scales_by_head_are_those_of_all_ranks() -> None:
    ranks = [catalogue.calibrated(from_short("int8,scale=head", MODEL, shard=Shard(rank, 2))) for rank in range(2)]
    one = catalogue.calibrated(from_short("int8,scale=head", MODEL))
    assert [c.scale for c in whole(ranks).groups[0].components] == [c.scale for c in one.groups[0].components]
    assert len({x for c in one.groups[0].components for row in c.scale.values for x in row}) > 4  # type: ignore[union-attr]
    outcomes = matrix.run_two(("a", "b"), (ranks, [from_short("bf16", MODEL)]))
    assert [(o.path, o.fault, o.rank_pairs) for o in outcomes] == [("CONVERT", "", 2)] * 2


@pytest.mark.process
def test_outcomes_do_not_depend_on_the_number_of_processes() -> None:
    chosen = matrix.pairs(6, seed=2)
    said: list[tuple[int, int, int]] = []
    assert matrix.run(chosen, processes=2, report=lambda *numbers: said.append(numbers)) == matrix.run(chosen)
    assert said[-1] == (6, 6, 0)


def test_tables_count_and_name_faults() -> None:
    outcomes = matrix.run_two(("a", "b"), two())
    assert [(o.prefill, o.decode, o.path) for o in outcomes] == [("a", "b", "CONVERT"), ("b", "a", "CONVERT")]
    assert "FAULT" not in matrix.table(outcomes)
    broken = [outcomes[0], replace(outcomes[1], fault="fused: wrong")]
    assert matrix.table(broken).splitlines()[3] == "FAULT b -> a: fused: wrong"
    assert matrix.as_json(outcomes)["paths"] == {"DIRECT": 0, "REMAP": 0, "CONVERT": 2, "REFUSED": 0}


def write(path: Path, layout: Layout) -> str:
    path.write_bytes(encode(layout, format="toml"))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["bench", "conformance", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_two_layouts_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = [write(tmp_path / name, x[0]) for name, x in zip(("a.toml", "b.toml"), two(), strict=True)]
    code, out, _ = run(capsys, *names)
    assert code == 0
    assert out.splitlines()[0].rstrip() == f"{names[0]} -> {names[1]}: CONVERT"
    assert f"planted mistakes noticed: {len(mutations.names())} of {len(mutations.names())}" in out
    code, out, _ = run(capsys, *names, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["pairs"], found["faults"], found["mistakes_missed"]) == (2, 0, [])
    assert found["outcomes"][0]["ways"] == ["fused", "portable", "staged"]


def test_all_ranks_of_two_forms(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "engine:vllm,pool=LBHNC,tp=3", "engine:sglang,page=64,pp=2", "--json")
    assert code == 0
    assert {(o["path"], o["rank_pairs"]) for o in json.loads(out)["outcomes"]} == {("REMAP", 6)}
    code, out, _ = run(capsys, "int8,scale=head,tp=2", "bf16", "--model", "llama-3.1-8b", "--json")
    assert code == 0
    assert {(o["path"], o["rank_pairs"]) for o in json.loads(out)["outcomes"]} == {("CONVERT", 2)}


def test_a_sample_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--sample", "4", "--seed", "5", "--processes", "1")
    assert code == 0
    assert "4 of 4 pairs, 0 faults" in err
    assert out.split("\n")[0].split() == ["model", "layouts", "pairs", *matrix.PATHS, "faults"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.toml"], "1 layouts: give two, or none"),
        (["--sample", "-1"], "--sample -1"),
        (["--processes", "0"], "--processes 0"),
        (["a.toml", "b.toml", "--sample", "3"], "--sample is for the catalogue: leave it out with two layouts"),
        (["a.toml", "b.toml", "--processes", "2"], "--processes is for the catalogue"),
        (["--seed", "-1"], "--seed -1"),
        (["nowhere.toml", "nowhere.toml"], "nowhere.toml: cannot be read"),
    ],
)
def test_misuse_is_named(capsys: pytest.CaptureFixture[str], arguments: Sequence[str], message: str) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert message in err


def test_layouts_of_the_catalogue_are_sound() -> None:
    """Of the layouts that the sample may miss: records and blocks whose arrays share a region."""
    for entry in catalogue.entries():
        if "record" in entry.form or "per_token_head" in entry.form:
            check_memory(catalogue.build(entry)[0])
