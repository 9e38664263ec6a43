"""Text to tokens and back, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.normalizers
from hypothesis import given
from hypothesis import strategies as st
from serve_rig import CORPUS, SPECIALS, STEADY, TEMPLATE, train

from regauge.config import BUNDLED_MODEL, cache_dir
from regauge.errors import ConfigError
from regauge.serve.text import Detokenizer, StopScanner, TemplateError, Tokenizer

BYTE_LEVEL = train()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(CORPUS)


def spaced() -> tokenizers.Tokenizer:
    """A tokenizer in the manner of Llama 2: spaces are U+2581, unknown characters fall back to bytes."""
    names = [
        "<unk>",
        "<s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *"abcdefghij",
        "▁a",
        "▁b",
        "cd",
    ]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[("▁", "a"), ("▁", "b"), ("c", "d")],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<s>"])
    return core


BOTH = {"byte level": Tokenizer(BYTE_LEVEL), "spaced": Tokenizer(spaced())}


def one_by_one(tokenizer: Tokenizer, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", BOTH)
@STEADY
@given(text=TEXT)
def test_token_by_token_gives_the_text_of_the_whole(kind: str, text: str) -> None:
    tokenizer = BOTH[kind]
    ids = tokenizer.encode(text)
    assert "".join(one_by_one(tokenizer, ids)) == tokenizer.decode(ids) == text


@STEADY
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=80))
def test_tokens_that_are_no_text_give_what_the_whole_gives(ids: list[int]) -> None:
    tokenizer = BOTH["byte level"]
    assert "".join(one_by_one(tokenizer, ids)) == tokenizer.decode(ids)


def test_text_comes_as_soon_as_its_character_is_whole() -> None:
    tokenizer = BOTH["byte level"]
    ids = [tokenizer.encode(char)[0] for char in "x"] + BYTE_LEVEL.encode("\U0001d11e").ids
    assert len(ids) == 5
    assert one_by_one(tokenizer, ids) == ["x", "", "", "", "\U0001d11e", ""]


def test_an_answer_keeps_the_space_that_parts_it_from_its_prompt() -> None:
    tokenizer = BOTH["spaced"]
    prompt, whole = tokenizer.encode("ab"), tokenizer.encode("ab a cd")
    answer = whole[len(prompt) :]
    assert whole[: len(prompt)] == prompt
    assert "".join(one_by_one(tokenizer, answer, prompt)) == " a cd"
    assert "".join(one_by_one(tokenizer, answer)) == "a cd"


def test_special_tokens_are_left_out_and_change_nothing_around_them() -> None:
    tokenizer = BOTH["spaced"]
    start = tokenizer.encode("<s>")[-1]
    assert tokenizer.is_special(start)
    ids = [*tokenizer.encode("ab"), start, *tokenizer.encode("ab")]
    assert "".join(one_by_one(tokenizer, ids)) == tokenizer.decode(ids) == "ab ab"


class Counting(Tokenizer):
    """Counts the tokens that are decoded."""

    decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return super().decode(ids)


@pytest.mark.parametrize("text", ["a word and another " * 100, None], ids=["text", "stray bytes"])
def test_each_token_costs_the_same_however_many_came_before(text: str | None) -> None:
    tokenizer = Counting(BYTE_LEVEL)
    stray = BYTE_LEVEL.token_to_id("\u0143")  # stands for a byte above 0x7f
    assert stray is not None
    ids = tokenizer.encode(text) if text else [stray] * 500
    one_by_one(tokenizer, ids)
    assert tokenizer.decoded < 80 * len(ids)


@STEADY
@given(TEXT)
def test_token_bytes_add_up_to_the_text(text: str) -> None:
    tokenizer = BOTH["byte level"]
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


def test_token_bytes_of_the_spaced_kind() -> None:
    tokenizer = BOTH["spaced"]
    assert [tokenizer.token_bytes(token) for token in tokenizer.encode("cdé")] == [
        b" ",
        b"cd",
        b"\xc3",
        b"\xa9",
    ]
    assert tokenizer.token_bytes(10**6) == b""
    assert Tokenizer(BYTE_LEVEL).token_bytes(SPECIALS.index("<|im_end|>")) == b"<|im_end|>"


ALPHABET = st.text("ab", max_size=30)


def first_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The same by plain search: the stop that is complete first, of those the longest."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, length = min(ends)
    return text[: end + length], text[end + length : end]


@STEADY
@given(
    pieces=st.lists(st.text("ab", max_size=6), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
)
def test_a_stop_is_found_wherever_it_is_split(pieces: list[str], stops: list[str]) -> None:
    scanner, given_out, hit = StopScanner(stops), "", None
    for piece in pieces:
        text, hit = scanner.push(piece)
        given_out += text
        if hit:
            break
    else:
        given_out += scanner.flush()
    assert (given_out, hit) == first_stop("".join(pieces), stops)


def test_text_is_held_back_only_while_a_stop_may_still_begin_in_it() -> None:
    scanner = StopScanner(["END", "\n\n"])
    assert scanner.push("abc E") == ("abc ", None)
    assert scanner.push("N") == ("", None)
    assert scanner.push("x") == ("ENx", None)
    assert scanner.push("y\n") == ("y", None)
    assert scanner.push("\nz") == ("", "\n\n")


def test_a_chat_is_written_as_its_template_says(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    text = "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages) == text
    ids = tokenizer.encode_chat(messages)
    assert [SPECIALS[token] for token in ids if tokenizer.is_special(token)] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]


def render(template: str, **specials: str) -> str:
    tokenizer = Tokenizer(BYTE_LEVEL, template=template, specials=specials)
    return tokenizer.render_chat([{"role": "user", "content": "a<b"}])


def test_what_templates_rely_on() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == "<s>a<b"
    assert render("{{ messages | tojson }}") == '[{"role":"user","content":"a<b"}]'
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}x{{ messages | length }}{% endgeneration %}") == "x1"
    assert render("{{ strftime_now('%Y') }}").isdigit()


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ missing.field }}",
        "{{ ''.__class__.__mro__ }}{{ 1 / 0 }}",
    ],
)
def test_a_refusing_template_is_an_error_of_its_own(template: str) -> None:
    with pytest.raises(TemplateError):
        render(template)


def test_no_template_is_said_so() -> None:
    with pytest.raises(TemplateError, match="/v1/completions"):
        Tokenizer(BYTE_LEVEL).encode_chat([])


def folder(path: Path, **files: Any) -> Path:
    (path / "tokenizer.json").write_text(BYTE_LEVEL.to_str(), encoding="utf-8")
    for name, content in files.items():
        (path / f"{name}.json").write_bytes(msgspec.json.encode(content))
    return path


def test_a_folder_brings_template_special_tokens_and_context_limit(tmp_path: Path) -> None:
    settings = {
        "chat_template": [
            {"name": "rag", "template": "no"},
            {"name": "default", "template": "{{ bos_token }}!"},
        ],
        "bos_token": {"content": "<|im_start|>"},
    }
    tokenizer = Tokenizer.load(folder(tmp_path, tokenizer_config=settings, config={"max_position_embeddings": 99}))
    assert (tokenizer.max_context, tokenizer.vocab_size) == (99, BYTE_LEVEL.get_vocab_size())
    assert tokenizer.render_chat([]) == "<|im_start|>!"
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    assert Tokenizer.load(tmp_path).render_chat([]) == "<|im_start|>assistant\n"


def test_a_folder_at_fault_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    folder(tmp_path, tokenizer_config={"chat_template": "{% for %}"})
    with pytest.raises(ConfigError, match="chat template does not compile"):
        Tokenizer.load(tmp_path)
    folder(tmp_path, tokenizer_config={"chat_template": ["{{ a }}", {"name": "default", "template": "{{ 1 }}"}]})
    assert Tokenizer.load(tmp_path).render_chat([]) == "1"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: is not UTF-8"):
        Tokenizer.load(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"config\.json: "):
        Tokenizer.load(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json: Is a directory"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.model
def test_the_bundled_model_reads_and_writes_as_transformers_does() -> None:
    from transformers import AutoTokenizer

    from regauge.engines.local.prepare import prepare

    path = prepare(BUNDLED_MODEL, cache_dir())
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    chats = [
        [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "ok"},
            {"role": "user", "content": "?"},
        ]
        for text in CORPUS
    ]
    for messages in chats:
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert ours.encode_chat(messages) == expected
    for text in CORPUS:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert "".join(one_by_one(ours, ids)) == theirs.decode(ids, clean_up_tokenization_spaces=False) == text
