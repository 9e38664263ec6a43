"""Scenarios: what is written is what is run, and what is wrong is refused with field and remedy."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from regauge.errors import ConfigError
from regauge.sim.scenario import SCENARIOS, Scenario, decode, load, override


def test_an_empty_file_is_the_default() -> None:
    assert decode(b"") == Scenario()


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_comes_with_it_can_be_read(name: str) -> None:
    assert load(name).prefill.servers in (12, 96)


def test_a_scenario_written_out_is_the_same_again() -> None:
    made = decode(b"""
        catalogue = ["mine.toml"]
        [prefill]
        servers = 3
        speeds = { p2 = 0.5 }
        [route]
        policy = "prefix"
        [run]
        policies = ["prefix", "cache+load"]
        [[faults]]
        at = 3.0
        for = 2.0
        what = "dead"
        who = "p0"
    """)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Scenario) == made


def test_files_are_relative_to_the_scenarios_folder(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text('catalogue = ["c.toml"]\n[trace]\nfile = "t.jsonl"\n')
    found = load(str(tmp_path / "s.toml"))
    assert (found.trace.file, found.catalogue) == (str(tmp_path / "t.jsonl"), [str(tmp_path / "c.toml")])


def test_options_go_over_the_file() -> None:
    found = override(load("article"), {"prefill": {"servers": 2}, "run": {"seeds": 5}})
    assert (found.prefill.servers, found.prefill.efficiency, found.run.seeds) == (2, 0.119, 5)
    with pytest.raises(ConfigError, match=r"options: run\.seeds: expected `int` >= 1"):
        override(found, {"run": {"seeds": 0}})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[prefil]\nservers = 1", "prefil: no such table; did you mean 'prefill'"),
        ("[prefill]\nserver = 1", "prefill.server: no such field; did you mean 'servers'"),
        ("[slo]\nxyz = 1", "slo.xyz: no such field; known: ttft_s, tpot_s"),
        ("[route]\npolcy = 'prefix'", "route.polcy: no such field; did you mean 'policy'"),
        ("[prefill]\nservers = -1", "prefill.servers: expected `int` >= 1"),
        ("[prefill]\nservers = 1.5", "prefill.servers: expected `int`, got `float`"),
        ("[trace]\nrate = -2.0", "trace.rate: expected `float` > 0.0"),
        ("[trace]\nscale = nan", "trace.scale: "),
        ("[prefill]\noverhead_s = nan", "prefill.overhead_s: "),
        ("[slo]\nttft_s = inf", "slo.ttft_s: "),
        ("[decode]\nslots = 'many'", "decode.slots: expected `int`, got `str`"),
        ("[network]\ntransfers = 'packets'", "network.transfers: invalid enum value 'packets'"),
        ("[run]\npolicies = ['best']", "run.policies[0]: invalid enum value 'best'"),
        ("[trace]\nfile = 'a'\nlike = 'b'", "trace.like: give it or trace.file, not both"),
        ("[trace]\nscale = 2.0", "trace.scale: is of a trace that is read; give trace.file (--trace), too"),
        ("[trace]\nlike = 'a'\ncopies = 2", "trace.copies: is of a trace that is read"),
        ("[trace]\nslice = '0:5'", "trace.slice: is of a trace that is read"),
        ("[trace]\nformat = 'azure'", "trace.format: is of a trace that is read"),
        ("[prefill]\nattention_s = 1e-9", "prefill.attention_s: goes with prefill.tokens_per_s"),
        ("[decode]\nstep_more_s = 1e-4", "decode.step_more_s: goes with decode.step_s"),
        ("[prefill]\ndevice = ''", "prefill: give a device of the catalogue"),
        ("[decode]\ndevice = ''\nstep_s = 0.1", "decode: give a device of the catalogue, or step_s, kv_tokens"),
        ("[prefill]\nspeeds = { p12 = 0.5 }", "prefill.speeds.p12: workers are p0 to p11"),
        ("[prefill]\nspeeds = { d0 = 0.5 }", "prefill.speeds.d0: workers are p0 to p11"),
        ("[network]\nracks = 2", "network.racks: goes with topology = \"racks\""),
        ("[network]\ntopology = 'racks'\nracks = 2", "network.uplinks: goes with topology = \"racks\" (one or more)"),
        ("[network]\nuplinks = 2", "network.uplinks: goes with"),
        ("[network]\ntree = 4", "network.tree: goes with topology = \"fat-tree\""),
        ("[network]\ntopology = 'ring'", "network.topology: invalid enum value 'ring'"),
        ("[run]\nflows = ['credit']", 'run.flows: flow control is compared at network.transfers = "flow"'),
        ("[route]\noffload_tokens = 9_000", "route.offload: a scenario's decode workers compute no prompts"),
        ("[route]\noffload = 'auto'", "route.offload: a scenario's decode workers compute no prompts"),
        ("[route]\nstale_s = -1.0", "route.stale_s: must be more than 0"),
        ("[[faults]]\nat = 1.0\nwhat = 'slow'\nwho = 'p0'", 'fault 1: factor: "slow" needs one'),
        ("[[faults]]\nat = -1.0\nwhat = 'dead'\nwho = 'p0'", "fault 1: at: must be 0 or more"),
        ("[model", "Expected ']' at the end of a table"),
    ],
)  # fmt: skip
def test_nonsense_is_refused_with_field_and_remedy(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        decode(text.encode(), "mine.toml")
    assert told in str(error.value)
    assert str(error.value).startswith("mine.toml: ")


def test_what_cannot_be_read_names_what_could(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="artikle: cannot be read: No such file or directory; did you mean 'article'"):
        load("artikle")
    with pytest.raises(ConfigError, match="shipped ones: article, large"):
        load(str(tmp_path / "gone.toml"))
    (tmp_path / "big.toml").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(ConfigError, match=r"big\.toml: larger than 1048576 bytes"):
        load(str(tmp_path / "big.toml"))
