"""What an engineer starts an engine with, as far as it changes how a cache lies; and what the engines' presets share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Literal

import msgspec

from regauge.errors import PresetError
from regauge.layout.dtypes import DTYPES, canonical
from regauge.layout.spec import Component, Model, Placement, Rule, Scale, Shard, State

Engine = Literal["vllm", "sglang"]
IN_A_FILE = "describe it in a file"
PLATFORMS = ("cuda", "gfx94x", "gfx95x", "musa", "cpu")


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of an engine. Defaults are the engines' own."""

    tp: int = 1
    rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    cp: int = 1
    """Neighbouring ranks of `tp` that share the tokens: `--decode-context-parallel-size` (vLLM), `--dcp-size` (SGLang)."""
    stripe: int = 1
    """vLLM's `--cp-kv-cache-interleave-size`."""
    page_size: int | None = None
    """Tokens; None: the engine's default."""
    kv_cache_dtype: str = "auto"
    model_dtype: str = ""
    """What `auto` stands for."""
    ssm_dtype: str = ""
    """Of recurrent states: vLLM's `--mamba-ssm-cache-dtype`, SGLang's SGLANG_MAMBA_SSM_DTYPE, or the config's
    mamba_ssm_dtype; empty: the engine's default."""
    pool: str | None = None
    record: str = ""
    """`packed` or `raw`: of the two formats that the attention backends of sparse MLA call by one dtype name."""
    platform: str = "cuda"
    pages: int = 0
    """Pages in each pool of tokens; 0: symbolic."""
    requests: int = 0
    """Records in the pool of recurrent states; 0: symbolic."""

    def shard(self) -> Shard:
        """Return the rank's shard. Raises PresetError naming a rank that does not exist."""
        for name, rank, size in (("rank", self.rank, self.tp), ("pp-rank", self.pp_rank, self.pp)):
            if size < 1 or not 0 <= rank < size:
                raise PresetError(f"there is no rank {rank} of {size}", path=name)
        if self.cp < 1 or self.tp % self.cp or self.stripe < 1:
            raise PresetError(f"{self.cp} ranks with stripes of {self.stripe} share the tokens among the {self.tp} tensor-parallel "
                              "ranks: give a divisor of tp", path="cp")  # fmt: skip
        # Neighbours that share tokens hold the same heads, so the others of them count as tensor-parallel ranks.
        return Shard(
            self.rank // self.cp, self.tp // self.cp, self.pp_rank, self.pp, self.rank % self.cp, self.cp, self.stripe
        )

    def computes_in(self) -> str:
        """Return the model's dtype. Raises PresetError where it is missing or no dtype to compute in."""
        if not self.model_dtype:
            raise PresetError("auto stands for the model's dtype, which its config does not say: give it, such as bfloat16",
                              path="model-dtype")  # fmt: skip
        model = canonical(self.model_dtype)
        if model is None or DTYPES[model].itemsize == 1:
            raise PresetError(f"{self.model_dtype!r} is no dtype to compute in; auto stands for the model's: float32, bfloat16 "
                              "or float16", path="model-dtype")  # fmt: skip
        return model

    def state_dtype(self, default: str) -> str:
        """Return the dtype of recurrent states. Raises PresetError for one that the engines do not keep them in."""
        found = canonical(self.ssm_dtype) if self.ssm_dtype else default
        if found not in ("float32", "bfloat16", "float16"):
            raise PresetError(f"{self.ssm_dtype!r}: choose float32, bfloat16 or float16", path="ssm-dtype")
        return found


def unknown(flag: str, value: str, choices: Iterable[str]) -> PresetError:
    """Return the error for a value that no preset is known for."""
    return PresetError(f"no preset for {value!r}; choose {', '.join(choices)}, or {IN_A_FILE}", path=flag)


def page_size(given: int | None, default: int, multiple: int) -> int:
    """Return the tokens of a page. Raises PresetError for one that the pool does not take."""
    size = default if given is None else given
    if size < 1 or size % multiple:
        raise PresetError(f"{size} tokens; this pool takes multiples of {multiple}", path="page")
    return size


def local_heads(state: State, shard: Shard) -> dict[str, int]:
    """Return how many heads of each array a rank holds."""
    return {name: len(shard.heads(array.heads)) for name, array in state.arrays.items()}


def constant_scale(dtype: str, rule: Rule) -> Scale | None:
    """Return the scale of a cache of that dtype that a checkpoint calibrates, or not: one factor per tensor, 1.0."""
    return Scale("tensor", values=1.0, rule=rule) if DTYPES[dtype].itemsize == 1 else None


def latent_rows(
    state: State, dtype: str, scales: Mapping[str, Scale | None], order: str, region: str
) -> list[Component]:
    """Return latent and rotated part side by side in one row per token. `order`: axes outside the page's own."""
    item, offset, components = DTYPES[dtype].itemsize, 0, []
    row = sum(array.dim for array in state.arrays.values()) * item
    for name, array in state.arrays.items():
        at = Placement(f"{order} token dim", region, offset, {"token": row})
        components.append(Component(name, dtype, 1, array.dim, at, scales[name]))
        offset += array.dim * item
    return components


def convolutions(
    state: State, shard: Shard, dtype: str, order: str, region: str, *, past_first: bool
) -> tuple[list[Component], int]:
    """Return the inputs that a delta net's convolutions keep, q, k, v side by side, and the bytes of a request.

    As (past, channels) with `past_first`, a head's channels being neighbours and its past inputs a row apart; else as
    (channels, past). `order`: axes outside a request's own. Raises PresetError for a recurrent state that is no delta net.
    """
    heads, past, item = local_heads(state, shard), past_inputs(state), DTYPES[dtype].itemsize
    sizes = {name: array.dim for name, array in state.arrays.items() if name != "ssm_state"}
    nbytes = sum(heads[name] * dim for name, dim in sizes.items()) * item
    offset, components = 0, []
    for name, dim in sizes.items():
        axes, strides = "head dim", {"page": nbytes}
        if past_first:
            axes = f"head dim dim:{past}"
            strides |= {"head": dim // past * item, "dim": item, f"dim:{past}": nbytes // past}
        at = Placement(f"{order} {axes}", region, offset, strides)
        components.append(Component(name, dtype, heads[name], dim, at))
        offset += heads[name] * (dim // past if past_first else dim) * item
    return components, nbytes


def placed(component: Component, place: Callable[[Placement], Placement]) -> Component:
    """Return a component whose elements and stored scales lie where `place` says of where they lay."""
    scale = component.scale
    if scale is not None and scale.at is not None:
        scale = msgspec.structs.replace(scale, at=place(scale.at))
    return msgspec.structs.replace(component, at=place(component.at), scale=scale)


def packed(model: Model, flags: Flags, dtype: str, *, default: bool) -> bool:
    """Say whether 8-bit latents of sparse MLA are records that hold their scales, which `flags.record` decides.

    Raises PresetError where there is nothing to pack.
    """
    narrow = DTYPES[dtype].itemsize == 1
    if flags.record == "packed" and not narrow:
        raise PresetError(f"latents of {dtype} have no scales to be packed with", path="record")
    sparse = narrow and any(state.kind == "indexer" for state in model.states)
    return sparse and (flags.record == "packed" if flags.record else default)


def past_inputs(state: State) -> int:
    """Return how many past inputs the convolutions of a delta net keep: the kernel's size less one.

    Raises PresetError for a recurrent state that is no delta net.
    """
    if lacking := [name for name in ("conv_q", "conv_v", "ssm_state") if name not in state.arrays]:
        raise PresetError(f"a delta net also keeps {', '.join(lacking)}; other recurrent states have no preset: {IN_A_FILE}",
                          path="model.states")  # fmt: skip
    query, value, ssm = (state.arrays[name].dim for name in ("conv_q", "conv_v", "ssm_state"))
    return isqrt(query * value // ssm)  # key dim * past * value dim * past over value dim * key dim


def is_kimi(model: Model) -> bool:
    """Say whether the delta net is Kimi's: it comes beside MLA, the gated delta net of Qwen beside attention."""
    return any(state.kind == "latent" for state in model.states)
