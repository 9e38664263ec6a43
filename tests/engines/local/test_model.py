"""The ragged forward against transformers' own forward, on random models of two kinds and on the bundled one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from regauge.config import EngineConfig
from regauge.engines.local.model import LocalModel, Segment
from regauge.engines.local.sampling import SamplingParams
from regauge.engines.local.scheduler import Request, Scheduler, pages_needed
from regauge.errors import EngineError

from .conftest import PAGE, PlainStore, tiny_folder

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a railway station where two tracks of different width meet.",
    (
        "List the first five prime numbers and explain, in one paragraph each, why 1 is not among them. "
        "Then say which of them are also Fibonacci numbers, and give the sum of all five."
    ),
)


def transformers_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        return model.eval()(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_ragged_steps_give_transformers_logits(kind: str, tmp_path: Path) -> None:
    """Two prompts in unequal chunks, a one-token prompt and decodes share steps, their pages interleaved."""
    folder = tiny_folder(kind, tmp_path)
    model = LocalModel(folder, threads=1)
    store = PlainStore(model, 32)
    rng = np.random.default_rng(1)
    texts = {name: rng.integers(3, 300, n).tolist() for name, n in (("a", 70), ("b", 41), ("c", 3))}
    pages = {"a": np.array([9, 0, 7, 30, 2]), "b": np.array([1, 31, 3]), "c": np.array([8])}
    expected = {name: transformers_logits(folder, text) for name, text in texts.items()}
    steps = [
        [("a", 0, 33), ("b", 0, 17)],
        [("c", 0, 1), ("a", 33, 36), ("b", 17, 23)],
        [("b", 40, 1), ("c", 1, 2)],
    ]
    steps.append([("a", 69, 1)])
    for step in steps:
        tokens = [token for name, start, count in step for token in texts[name][start : start + count]]
        segments = [Segment(name, pages[name], start, count) for name, start, count in step]
        logits = model.forward(tokens, segments, store)
        assert logits.dtype == torch.float32
        assert logits.shape == (len(step), model.vocab)
        for row, (name, start, count) in zip(logits, step, strict=True):
            torch.testing.assert_close(row, expected[name][start + count - 1], atol=2e-5, rtol=1e-4)


def test_properties_come_from_the_config(tiny: LocalModel) -> None:
    assert (tiny.num_layers, tiny.kv_heads, tiny.head_dim) == (2, 2, 16)
    assert (tiny.vocab, tiny.max_context, tiny.eos_ids) == (300, 256, {2})
    assert tiny.dtype == torch.float32


def test_on_layer_is_called_in_order_once_the_layer_is_stored(tiny: LocalModel) -> None:
    store = PlainStore(tiny, 4)
    seen: list[tuple[int, bool, bool]] = []

    def on_layer(layer: int) -> None:
        seen.append((layer, bool(store.k[layer, :5].any()), bool(store.k[layer + 1 :].any())))

    tiny.forward([5, 6, 7, 8, 9], [Segment("a", np.array([0]), 0, 5)], store, on_layer)
    assert seen == [(0, True, False), (1, True, False)]


@pytest.mark.parametrize("counts", [[], [2], [3, 1], [3, 0]])
def test_tokens_must_fill_the_segments(tiny: LocalModel, counts: list[int]) -> None:
    segments = [Segment(str(n), np.array([n]), 0, count) for n, count in enumerate(counts)]
    with pytest.raises(EngineError, match="3 tokens do not fill segments"):
        tiny.forward([5, 6, 7], segments, PlainStore(tiny, 4))


def test_a_model_whose_layers_bypass_the_store_is_noticed(tiny_path: Path) -> None:
    model = LocalModel(tiny_path, threads=1)
    model._model.set_attn_implementation("eager")
    with pytest.raises(EngineError, match="0 of 2 layers reached the KV store"):
        model.forward([5], [Segment("a", np.array([0]), 0, 1)], PlainStore(model, 4))


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (transformers.MistralConfig(sliding_window=512, max_position_embeddings=1024), "sliding_window"),
        (transformers.Qwen2Config(use_sliding_window=True, max_window_layers=1), "layer_types"),
        (transformers.DeepseekV3Config(), "kv_lora_rank"),
        (transformers.Gemma2Config(), "attn_logit_softcapping"),
        (transformers.T5Config(), "is_encoder_decoder"),
        (
            transformers.LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "rope_parameters.rope_type",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_other_attention_is_refused_by_field(config: transformers.PreTrainedConfig, field: str, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=field):
        LocalModel(tmp_path)


def test_a_window_as_long_as_the_context_is_no_window(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.MistralConfig(
        vocab_size=50, num_key_value_heads=1, sliding_window=64, max_position_embeddings=64, **shape
    )
    transformers.MistralForCausalLM(config).save_pretrained(tmp_path)
    assert LocalModel(tmp_path, threads=1).max_context == 64


def test_a_model_without_the_attention_interface_is_refused(tmp_path: Path) -> None:
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=2)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="attention"):
        LocalModel(tmp_path)


@pytest.mark.parametrize("damage", ["no config", "unknown type", "no weights", "short weights"])
def test_a_damaged_folder_is_named(damage: str, tmp_path: Path) -> None:
    folder = tiny_folder("llama", tmp_path)
    if damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "unknown type":
        (folder / "config.json").write_text(json.dumps({"model_type": "steam"}))
    elif damage == "no weights":
        (folder / "model.safetensors").unlink()
    else:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(EngineError, match=str(tmp_path)):
        LocalModel(folder)


# --- the bundled model ---


class Chat:
    """The bundled model behind a scheduler, asked in words."""

    def __init__(self, model: LocalModel, folder: Path) -> None:
        self.model = model
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def tokens(self, question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        ids: list[int] = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        return ids

    def answers(self, questions: tuple[str, ...], chunk_tokens: int = 256) -> list[list[int]]:
        """Greedy answers of up to 64 tokens to questions that are asked together."""
        scheduler = Scheduler(self.model, PlainStore(self.model, 64), EngineConfig(chunk_tokens=chunk_tokens))
        sampling = SamplingParams(max_tokens=64, temperature=0)
        first = 0
        for n, question in enumerate(questions):
            tokens = tuple(self.tokens(question))
            count = pages_needed(len(tokens), sampling, PAGE)
            scheduler.add(Request(str(n), tokens, sampling, np.arange(first, first + count)))
            first += count
        found: list[list[int]] = [[] for _ in questions]
        while scheduler.has_work:
            for output in scheduler.step():
                found[int(output.request_id)].append(output.token)
        return found


@pytest.fixture(scope="module")
def chat(bundled: LocalModel, bundled_path: Path) -> Chat:
    return Chat(bundled, bundled_path)


@pytest.fixture(scope="module")
def alone(chat: Chat) -> list[list[int]]:
    return [chat.answers((question,))[0] for question in PROMPTS]


@pytest.mark.model
def test_bundled_answers_are_transformers_own(chat: Chat, alone: list[list[int]], bundled_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(bundled_path, dtype=torch.float32).eval()
    for question, answer in zip(PROMPTS, alone, strict=True):
        prompt = chat.tokens(question)
        own = model.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, len(prompt) :].tolist()
        assert answer == own
    assert any(len(answer) == 64 for answer in alone)
    # Logits at every position of the longest text, teacher-forced in one pass here and in chunks of 37 there.
    text = prompt + answer
    with torch.inference_mode():
        expected = model(torch.tensor([text]), use_cache=False).logits[0]
    store = PlainStore(chat.model, 32)
    for start in range(0, len(text), 37):
        part = text[start : start + 37]
        logits = chat.model.forward(part, [Segment("a", np.arange(32), start, len(part))], store)
        torch.testing.assert_close(logits[0], expected[start + len(part) - 1], atol=2e-3, rtol=1e-3)


@pytest.mark.model
def test_bundled_chunked_prefill_gives_the_same_answers(chat: Chat, alone: list[list[int]]) -> None:
    assert chat.answers(PROMPTS[2:], chunk_tokens=16) == alone[2:]


@pytest.mark.model
def test_bundled_answers_do_not_depend_on_company(chat: Chat, alone: list[list[int]]) -> None:
    assert chat.answers(PROMPTS) == alone


@pytest.mark.model
def test_bundled_answers_are_sensible(chat: Chat, alone: list[list[int]]) -> None:
    assert chat.tokenizer.decode(alone[0]) == "The capital of France is Paris.<|im_end|>"
    story = chat.tokenizer.decode(alone[1], skip_special_tokens=True)
    assert {"the", "a", "of", "and"} <= set(story.split())
    assert "station" in story
