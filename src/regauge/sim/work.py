"""What a model computes for a prompt, and what it keeps of it, from its config: floating-point operations and bytes.

| part | operations of one token at position i (0 the first) | source |
|---|---|---|
| linear layers | 2 x active parameters | a multiplication and an addition for each weight |
| attention, window | 2 x heads x (key dim + value dim) x min(i, window), per layer | scores and weighted sum |
| MLA, dense | the same with key dim nope + rope: expanded, as prefill kernels compute it | DeepSeek-V2, section 2.1 |
| MLA, sparse | 2 x heads x (2 x rank + rope) x min(i, top-k): absorbed, since each token reads other rows | DeepSeek-V3.2 report |
| indexer | 2 x index heads x index dim x i, in the layers that have one | DeepSeek-V3.2 report |
| linear attention | 6 x heads x key dim x value dim: decay, update, read of the state | the recurrent form; chunked kernels compute more |

A token attends to those before it, i of them on average between first and end: the half that the causal mask drops is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from regauge.errors import ConfigError
from regauge.layout.config import Config, language_model, read_config
from regauge.layout.models import model_from_config
from regauge.layout.spec import Layout, State
from regauge.layout.view import bytes_per_token, element_bytes


@dataclass(frozen=True, slots=True)
class Term:
    """Operations that grow with the tokens attended to."""

    what: str
    per_pair: float
    """Operations for one token and one attended token, all layers together."""
    most: int = 0
    """Attended tokens are at most so many; 0: all before."""

    def operations(self, first: int, end: int) -> float:
        """Return the operations of tokens [first, end): per_pair times the sum of min(i, most), in closed form."""
        return self.per_pair * (_pairs(end, self.most) - _pairs(first, self.most))


@dataclass(frozen=True, slots=True)
class Work:
    """What a model computes."""

    per_token: float
    """Operations of any token, wherever it stands."""
    terms: tuple[Term, ...]

    def operations(self, first: int, end: int) -> float:
        """Return the operations of tokens [first, end), those before `first` being in the cache. Raises ConfigError for none."""
        if not 0 <= first <= end:
            raise ConfigError(f"tokens [{first}, {end}) are none: 0 <= cached <= prompt")
        return self.per_token * (end - first) + sum(t.operations(first, end) for t in self.terms)

    def attention(self, first: int, end: int) -> float:
        """Return the part of `operations` that grows with the context."""
        return sum(t.operations(first, end) for t in self.terms)


def model_work(source: str, active: float) -> Work:
    """Return the work of a Hugging Face folder, config.json, or shipped name, of `active` parameters per token.

    Raises PresetError for a config without the shapes that this needs, ConfigError for `active` that is not positive.
    """
    if not 0.0 < active < float("inf"):
        raise ConfigError("active parameters: a positive number")
    values, name = read_config(source)
    config, constant = language_model(values), 0.0
    terms: list[Term] = []
    for state in model_from_config(values, name=name).states:
        layers = len(state.layer_ids)
        if state.kind == "recurrent":
            constant += 6.0 * layers * state.arrays["ssm_state"].heads * state.arrays["ssm_state"].dim
        else:
            terms.append(_term(config, state, layers))
    return Work(2.0 * active + constant, tuple(terms))


def kv_bytes(layout: Layout, tokens: float) -> float:
    """Return the bytes that a request of so many tokens keeps on this rank: per token, and its recurrent records once."""
    fixed = sum(
        len(g.layer_ids) * element_bytes(c) for g in layout.groups if g.kind == "recurrent" for c in g.components
    )
    return bytes_per_token(layout) * tokens + fixed


def _term(config: Config, state: State, layers: int) -> Term:
    heads = config.integer("num_attention_heads")
    if state.kind == "indexer":
        return Term("indexer", 2.0 * layers * config.integer("index_n_heads") * state.arrays["index_k"].dim)
    if state.kind != "latent":
        dims = state.arrays["k"].dim + state.arrays["v"].dim
        return Term(state.kind, 2.0 * layers * heads * dims, state.window)
    rotated = config.integer("qk_rope_head_dim", 0, least=0)
    if config.get("index_topk"):
        rank = config.integer("kv_lora_rank")
        return Term("sparse latent", 2.0 * layers * heads * (2 * rank + rotated), config.integer("index_topk"))
    dims = config.integer("qk_nope_head_dim") + rotated + config.integer("v_head_dim")
    return Term("latent", 2.0 * layers * heads * dims)


def _pairs(end: int, most: int) -> float:
    """The sum of min(i, most) over i in [0, end)."""
    if not most or end <= most:
        return end * (end - 1) / 2
    return most * (most - 1) / 2 + (end - most) * float(most)
