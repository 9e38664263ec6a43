"""A plain KV store, a scheduler rig, a tiny random model, and the bundled model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from regauge.config import BUNDLED_MODEL, EngineConfig, cache_dir
from regauge.engines.local.model import LocalModel, Segment
from regauge.engines.local.prepare import prepare
from regauge.engines.local.sampling import SamplingParams
from regauge.engines.local.scheduler import Output, Request, Scheduler

PAGE = 16


class PlainStore:
    """Pages of float32 in two contiguous tensors: the simplest store that follows the protocol."""

    def __init__(self, model: LocalModel, pages: int, page_size: int = PAGE) -> None:
        shape = (model.num_layers, pages * page_size, model.kv_heads, model.head_dim)
        self.page_size = page_size
        self.k = torch.zeros(shape)
        self.v = torch.zeros(shape)
        self._all: list[torch.Tensor] = []
        self._new = torch.empty(0, dtype=torch.int64)

    def begin(self, segments: Sequence[Segment]) -> None:
        self._all = [self.places(segment.pages, segment.start + segment.count) for segment in segments]
        self._new = torch.cat([all_[s.start :] for all_, s in zip(self._all, segments, strict=True)])

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k[layer, self._new] = k
        self.v[layer, self._new] = v

    def read(self, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = self._all[index]
        return self.k[layer, places].transpose(0, 1), self.v[layer, places].transpose(0, 1)

    def places(self, pages: Sequence[int] | np.ndarray, tokens: int) -> torch.Tensor:
        """The pool slots of a request's first `tokens` tokens."""
        position = np.arange(tokens)
        return torch.from_numpy(
            np.asarray(pages)[position // self.page_size] * self.page_size + position % self.page_size
        )


def tiny_folder(kind: str, folder: Path) -> Path:
    """Write a random two-layer model of the given transformers type."""
    import transformers

    common = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(7)
    model_class(config_class(**common)).save_pretrained(folder)
    return folder


CONFIG = EngineConfig(max_context=200, max_batch=4, chunk_tokens=32)
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, 300, length).tolist())


class Pages:
    """Hands out page tables from the end of the pool, one after the other."""

    def __init__(self) -> None:
        self.next = 0

    def take(self, tokens: int) -> np.ndarray:
        count = -(-tokens // PAGE)
        self.next += count
        return np.arange(self.next - 1, self.next - 1 - count, -1)


class Rig:
    """A scheduler, its store and pages."""

    def __init__(self, model: LocalModel, config: EngineConfig = CONFIG, store: PlainStore | None = None) -> None:
        self.store = store or PlainStore(model, 96)
        self.scheduler = Scheduler(model, self.store, config)
        self.pages = Pages()
        self.steps: list[list[Output]] = []

    def request(self, name: str, tokens: tuple[int, ...], sampling: SamplingParams = GREEDY, **more: object) -> Request:
        pages = self.pages.take(len(tokens) + sampling.max_tokens)
        return Request(**{"id": name, "token_ids": tokens, "sampling": sampling, "pages": pages, **more})

    def add(self, name: str, tokens: tuple[int, ...], sampling: SamplingParams = GREEDY, **more: object) -> Request:
        request = self.request(name, tokens, sampling, **more)
        self.scheduler.add(request)
        return request

    def step(self) -> list[str]:
        """Run a step; return who got a token."""
        self.steps.append(self.scheduler.step())
        return [output.request_id for output in self.steps[-1]]

    def finish(self, limit: int = 400) -> dict[str, list[int]]:
        """Run to the end; return the tokens of each request."""
        while self.scheduler.has_work:
            assert len(self.steps) < limit, "the scheduler does not come to an end"
            self.step()
        tokens: dict[str, list[int]] = {}
        for output in (o for step in self.steps for o in step):
            assert output.index == len(tokens.setdefault(output.request_id, []))
            tokens[output.request_id].append(output.token)
        return tokens

    def ends(self) -> dict[str, str]:
        return {o.request_id: o.finish_reason for step in self.steps for o in step if o.finish_reason}


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> LocalModel:
    return LocalModel(tiny_path, threads=1)


@pytest.fixture(scope="session")
def bundled_path() -> Path:
    return prepare(BUNDLED_MODEL, cache_dir())


@pytest.fixture(scope="session")
def bundled(bundled_path: Path) -> LocalModel:
    return LocalModel(bundled_path, threads=1)  # two threads on two busy cores wait for each other
