"""The command line: one verb per job. Exit codes: 0 fine, 1 found a problem, 2 misuse.

Built on argparse and not on a larger library, because `regauge --help` must answer at once: heavy packages are imported by the
verb that needs them.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from regauge import (
    __version__,
    cli_check,
    cli_conformance,
    cli_cost,
    cli_doctor,
    cli_engine,
    cli_faults,
    cli_keys,
    cli_meter,
    cli_plan,
    cli_probe,
    cli_quality,
    cli_serve,
    cli_sim,
    cli_top,
    cli_topology,
    cli_trace,
    cli_why,
)
from regauge.errors import ConfigError, LayoutError, Refused, RegaugeError

if TYPE_CHECKING:
    from regauge.layout.spec import Layout

_LAYOUT_HELP = (
    "a layout file (.toml, .json), a short form such as fp8_e4m3,page=64,hnd, or an engine's flags such as "
    "engine:sglang,pool=hnd,page=64,dtype=fp8_e4m3,tp=8,rank=3"
)
_MODEL_HELP = "model of short forms and engines: a Hugging Face folder, a config.json, or a shipped name (see `regauge layout --list`)"
_ENGINE_WORDS = {
    "pool": "how the engine's pools lie; a wrong name lists the choices",
    "kv-cache-dtype": "as the engine's flag; default auto",
    "model-dtype": "what auto stands for; default: as the model's config says",
    "ssm-dtype": "of recurrent states; default: as the model's config says, or the engine's",
    "record": "packed or raw: of the two formats of 8-bit latents of sparse attention",
    "platform": "cuda, musa, gfx94x, gfx95x or cpu: what an fp8 flag means",
}
_ENGINE_NUMBERS = {
    "page-size": "tokens per page of the engine; default: the engine's",
    "tp": "tensor-parallel size, default 1",
    "pp": "pipeline-parallel size, default 1",
    "pp-rank": "pipeline stage, default 0",
    "cp": "ranks of decode context parallelism, default 1",
    "stripe": "tokens per stripe of context parallelism, default 1",
    "pages": "pages in each pool; none (default): symbolic",
    "requests": "records in the pools of recurrent states; none (default): symbolic",
}


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest word for one that does not exist, and takes the words of a `*` argument after options too."""

    words: str | None = None
    """Name of the argument that takes any number of words."""

    def parse_known_args(  # type: ignore[override]  # argparse's overloads are for namespaces of other types
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, left = super().parse_known_args(args, namespace)
        if self.words is not None:  # before Python 3.13, argparse gives it none but those before the first option
            setattr(found, self.words, [*getattr(found, self.words), *(x for x in left if not x.startswith("-"))])
            left = [x for x in left if x.startswith("-")]
        return found, left

    def error(self, message: str) -> NoReturn:
        found = re.search(r"(argument COMMAND: )?invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if found:
            near = difflib.get_close_matches(found[2], re.findall(r"[\w-]+", found[3]), n=1)
            message = f"no such command: {found[2]!r}" if found[1] else message
            message += f"; did you mean {near[0]!r}?" if near else ""
        super().error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="regauge", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="KV caches cross between unlike accelerators: checked, planned, carried.",
        epilog="serving:   serve, worker, keys, top, trace, why\noperating: topology, doctor\nlayouts:   check, explain, layout, probe\nplanning:  plan, sim\nmeasuring: bench\nbilling:   usage, invoice, prices, meter\nhelp:      version, collect-env\n\n"
        "exit codes: 0 fine, 1 found a problem, 2 misuse")  # fmt: skip
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", required=True, parser_class=_Parser)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        new = verbs.add_parser(name, help=text, description=text)
        new.add_argument("--json", action="store_true", help="print JSON")
        return new

    cli_serve.arguments(verb("serve", "serve a model across a prefill and a decode process"), _LAYOUT_HELP)
    cli_serve.worker_arguments(verb("worker", "run workers on this host, which register at gateways elsewhere"))
    cli_top.arguments(verb("top", "show how the transfers of a running gateway stand"))
    cli_trace.arguments(verb("trace", "show when each step of a request was, over the gateway and its workers"))
    cli_why.arguments(verb("why", "say why a request went to the workers that it went to"))
    cli_doctor.arguments(verb("doctor", "examine this host's planes, and say what is wrong and how to mend it"))
    cli_keys.arguments(_jobs(verb("keys", "make API keys for tenants of the gateway")))
    for name, text in (
        ("check", "say which path a pair of layouts takes, or why none"),
        ("explain", "say what the transfer of a pair does"),
    ):
        new = verb(name, text)
        new.add_argument("prefill", metavar="PREFILL", help=_LAYOUT_HELP)
        new.add_argument("decode", metavar="DECODE", help="the same, of the decode side")
        new.add_argument("--model", default="smollm2-135m-instruct", help=_MODEL_HELP + "; default %(default)s")
        if name == "check":
            new.epilog = (
                "A folder with a layout file per rank is a side, too; one layout stands for all its TP and CP ranks."
            )
            cli_quality.check_arguments(new)
        else:
            new.add_argument("--tokens", type=int, default=4096, help="tokens of the request, default %(default)s")
            cli_cost.explain_arguments(new)
    layout = verb("layout", "print a layout as TOML, with its bytes per token and page")
    layout.add_argument("form", metavar="LAYOUT", nargs="?", help=_LAYOUT_HELP)
    layout.add_argument("--model", default="smollm2-135m-instruct", help=_MODEL_HELP + "; default %(default)s")
    layout.add_argument("--engine", metavar="NAME", help="the pools of vllm or sglang, from the flags below")
    for name, text in _ENGINE_WORDS.items():
        layout.add_argument(f"--{name}", metavar="NAME", help=text)
    layout.add_argument("--tp-rank", "--rank", dest="rank", type=int, help="tensor-parallel rank, default 0")
    for name, text in _ENGINE_NUMBERS.items():
        layout.add_argument(f"--{name}", type=int, metavar="N", help=text)
    layout.add_argument("--list", action="store_true", help="list the shipped models")
    cli_probe.arguments(
        verb("probe", "check a declared layout against an engine's bytes, or search a dump"), _LAYOUT_HELP, _MODEL_HELP
    )
    _bench_arguments(
        verb(
            "bench",
            "measure what a conversion does to a model's answers, what moving costs here, or how fast an engine is",
        )
    )
    cli_plan.arguments(verb("plan", "size a prefill and a decode pool for a workload, and say what binds"))
    cli_sim.arguments(verb("sim", "simulate what a cluster does with a trace"))
    cli_topology.arguments(
        _jobs(
            verb(
                "topology", "turn a bill of materials into port maps, addresses, network files and switch configuration"
            )
        )
    )
    cli_meter.arguments(verb, _jobs)
    verb("version", "print the version")
    verb("collect-env", "print what a bug report needs")
    return parser


def _jobs(verb: argparse.ArgumentParser) -> Callable[[str, str], _Parser]:
    """Return what adds a command, with its help, below a verb."""
    jobs = verb.add_subparsers(dest="what", metavar="COMMAND", required=True, parser_class=_Parser)

    def job(name: str, text: str) -> _Parser:
        new: _Parser = jobs.add_parser(name, help=text, description=text)
        new.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON")
        return new

    return job


def _bench_arguments(bench: argparse.ArgumentParser) -> None:
    job = _jobs(bench)
    cli_quality.accuracy_arguments(
        job("accuracy", "next-token agreement and perplexity against no transfer"), _LAYOUT_HELP
    )
    cli_cost.calibrate_arguments(job("calibrate", "the cost model's constants on this machine"))
    cli_engine.arguments(
        job("engine", "an engine's prefill and decode times, as the catalogue takes them"), _LAYOUT_HELP
    )
    conformance = job(
        "conformance", "every pair of real layouts, or two of yours in both directions, against the reference"
    )
    conformance.words = cli_conformance.arguments(conformance, _MODEL_HELP)
    cli_faults.arguments(
        job(
            "faults",
            "the transfer protocol in a simulated cluster, over a network that breaks, freezes, corrupts and kills",
        )
    )
    cli_quality.keygen_arguments(job("keygen", "make the key that signs quality records"))
    cli_quality.sign_arguments(job("sign", "vouch for a quality record"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    verbs = {"serve": cli_serve.run, "worker": cli_serve.run_worker, "check": _check, "explain": _explain, "layout": _layout, "probe": _probe, "bench": _bench,
             "top": cli_top.run, "trace": cli_trace.run, "why": cli_why.run, "usage": cli_meter.run, "invoice": cli_meter.run, "prices": cli_meter.run,
             "meter": cli_meter.run, "plan": cli_plan.run, "sim": cli_sim.run, "topology": cli_topology.run, "keys": cli_keys.run, "doctor": cli_doctor.run, "version": _version, "collect-env": _collect_env}  # fmt: skip
    try:
        code = verbs[options.verb](options)
        sys.stdout.flush()  # here, where a reader that has gone is no error
        return code
    except Refused as error:
        return _problem(options, "refused", list(error.reasons), 1)
    except (LayoutError, ConfigError) as error:
        return _problem(options, "error", [str(error)], 2)
    except RegaugeError as error:
        return _problem(options, "error", [str(error)], 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has had enough: `| head`
        return 0


def _problem(options: argparse.Namespace, kind: str, lines: list[str], code: int) -> int:
    if options.json:
        print(json.dumps({kind: lines}, indent=2))
    else:
        for line in lines:
            print(f"regauge: {kind}: {line}", file=sys.stderr)
    return code


def _print_json(value: Any) -> int:
    print(json.dumps(value, indent=2))
    return 0


# -- layouts -----------------------------------------------------------------------------------------------------------


def _pair(options: argparse.Namespace) -> tuple[Layout, Layout]:
    return _load(options.prefill, options.model), _load(options.decode, options.model)


def _load(text: str, name: str) -> Layout:
    from regauge.layout.presets import load_named

    return load_named(text, name)


def _check(options: argparse.Namespace) -> int:
    return cli_check.check(options, lambda text: _load(text, options.model))


def _explain(options: argparse.Namespace) -> int:
    return cli_cost.explain(options, *_pair(options))


def _chosen(options: argparse.Namespace) -> Layout:
    """The layout that `regauge layout` is asked for: by its engine's flags, as a file, or as a short form."""
    from regauge.layout.engines import PREFIX, Flags, engine_layout
    from regauge.layout.presets import from_short, is_file, load_described, load_model, load_named
    from regauge.layout.spec import Shard

    names = ["rank", *(n.replace("-", "_") for n in (*_ENGINE_WORDS, *_ENGINE_NUMBERS))]
    given = {n: getattr(options, n) for n in names if getattr(options, n) is not None}
    if options.engine is not None:
        if options.form is not None:
            raise ConfigError(f"give {options.form!r} or --engine, not both")
        told = load_described(options.model)
        dtypes = {"model_dtype": told.dtype, "ssm_dtype": told.state_dtype}
        return engine_layout(options.engine, told.model, Flags(**dtypes | given))
    own = {"rank", "tp", "pages", "requests"}
    if alien := [n for n in given if n not in own]:
        raise ConfigError(f"{', '.join('--' + n.replace('_', '-') for n in alien)}: needs --engine")
    if options.form is None:
        raise ConfigError("name a layout, or use --list for the shipped models")
    if is_file(options.form) or options.form.startswith(PREFIX):
        return load_named(options.form, options.model)
    shard = Shard(given.get("rank", 0), given.get("tp", 1))
    return from_short(options.form, load_model(options.model), shard=shard, pages=given.get("pages", 0),
                      requests=given.get("requests"))  # fmt: skip


def _layout(options: argparse.Namespace) -> int:
    from regauge.layout import files
    from regauge.layout.presets import shipped_models
    from regauge.layout.summary import summarize
    from regauge.layout.view import bytes_per_token

    if options.list:
        return _print_json(shipped_models()) if options.json else print("\n".join(shipped_models())) or 0
    layout = _chosen(options)
    per_token, groups = bytes_per_token(layout), summarize(layout)
    if options.json:
        plain = json.loads(files.encode(layout, format="json"))
        return _print_json({"layout": plain, "bytes_per_token": per_token, "groups": [asdict(g) for g in groups],
                            "digest": layout.digest()})  # fmt: skip
    sys.stdout.write(files.encode(layout, format="toml").decode())
    print("\n" + "\n".join(f"# {group.text()}" for group in groups))
    print(f"# {per_token} bytes per token in all\n# digest {layout.digest()}")
    return 0


def _probe(options: argparse.Namespace) -> int:
    if options.engine:
        cli_serve.need_engine()
    plain, text, code = cli_probe.run(options)
    if options.json:
        _print_json(plain)
    else:
        print(text)
    return code


# -- running -----------------------------------------------------------------------------------------------------------


def _bench(options: argparse.Namespace) -> int:
    if options.what == "calibrate":
        return cli_cost.calibrate(options)
    if options.what in ("conformance", "engine"):
        return cli_conformance.run(options) if options.what == "conformance" else cli_engine.run(options)
    if options.what == "faults":
        return cli_faults.run(options)
    if options.what in ("keygen", "sign"):
        written = cli_quality.keygen(options) if options.what == "keygen" else [cli_quality.sign(options)]
        return _print_json([str(x) for x in written]) if options.json else print(*written, sep="\n") or 0
    cli_serve.need_engine()
    rows, text = cli_quality.accuracy(options)
    return _print_json(rows) if options.json else print(text) or 0


# -- help --------------------------------------------------------------------------------------------------------------


def _version(options: argparse.Namespace) -> int:
    return _print_json({"version": __version__}) if options.json else print(f"regauge {__version__}") or 0


def _collect_env(options: argparse.Namespace) -> int:
    from regauge.cli_env import collect

    found = collect()
    if options.json:
        return _print_json(found)
    for key, value in found.items():
        text = ", ".join(f"{k} {v or 'missing'}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{key + ':':10} {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
