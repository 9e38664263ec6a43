"""Text to tokens and back: tokenizer and chat template of a model folder, incremental decoding, stop strings.

Uses the `tokenizers` library and the folder's own files. transformers.AutoTokenizer would do the same and imports
torch on the way: seconds, and hundreds of megabytes, that the gateway's process does not need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec
import tokenizers

from regauge.errors import ConfigError, RegaugeError

_REPLACEMENT: Final = "\ufffd"
_CONTEXT: Final = 6
"""Tokens of the prompt's end that the detokeniser starts from: enough to know whether a space leads."""
_HELD: Final = 8
"""Tokens after which text that still ends in an incomplete character is given out up to that character: no
character is that long, so the tokens are no text. Also the tokens that a window keeps when it grew too long."""


class TemplateError(RegaugeError):
    """The model's chat template refused the messages, or there is none."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; when serving it is nothing but its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own interface

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Tokenizer:
    """A model's tokenizer, chat template and context limit, read from a Hugging Face folder.

    `max_context` is the config's `max_position_embeddings`, in tokens, or None if it has none.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        template: str | None = None,
        specials: Mapping[str, str] = MappingProxyType({}),
        max_context: int | None = None,
    ) -> None:
        self._core = core
        self._core.no_padding()
        self._core.no_truncation()
        self._template = _compile(template) if template is not None else None
        self._specials = dict(specials)
        self._added = {index: token.content for index, token in _added(core).items()}
        self._special_ids = frozenset(index for index, token in _added(core).items() if token.special)
        self._byte_level = '"ByteLevel"' in _decoder_json(core)
        self.max_context = max_context
        self.vocab_size: int = core.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a folder with tokenizer.json. Raises ConfigError that names the file at fault."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{folder}: no tokenizer.json; give a folder with a fast tokenizer's file")
        try:
            core = tokenizers.Tokenizer.from_buffer(file.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{file}: {error}") from error
        settings = _read(folder / "tokenizer_config.json")
        config = _read(folder / "config.json")
        limit = config.get("max_position_embeddings")
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        try:
            return cls(
                core,
                template=_template_text(folder, settings),
                specials={name: text for name in names if (text := _token_text(settings.get(name)))},
                max_context=limit if isinstance(limit, int) else None,
            )
        except jinja2.TemplateError as error:
            raise ConfigError(f"{folder}: the chat template does not compile: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the special tokens that the model puts around one."""
        ids: list[int] = self._core.encode(text, add_special_tokens=True).ids
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a conversation, up to where the assistant's next message begins.

        Raises TemplateError with the template's own words when it refuses, or when the model has no template.
        """
        text = self.render_chat(messages)
        # The template has written the special tokens already.
        ids: list[int] = self._core.encode(text, add_special_tokens=False).ids
        return ids

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a conversation as the chat template writes it. Raises TemplateError."""
        if self._template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._specials,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise TemplateError(f"the model's chat template refused the messages: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        text: str = self._core.decode(list(ids), skip_special_tokens=True)
        return text

    def is_special(self, token: int) -> bool:
        """Whether a token is one of the model's control tokens."""
        return token in self._special_ids

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; a control token's are those of its name."""
        if token in self._added:
            return self._added[token].encode()
        text: str | None = self._core.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            return bytes(_BYTE_OF[char] for char in text if char in _BYTE_OF)
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace("\u2581", " ").encode()


def _byte_alphabet() -> Mapping[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's `bytes_to_unicode`, inverted).

    Printable bytes stand for themselves, the others for the characters from U+0100 on, in order.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in plain]
    return MappingProxyType(
        {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}
    )


_BYTE_OF: Final = _byte_alphabet()


class Detokenizer:
    """Turns tokens into text one at a time, in time linear in their number.

    Text comes out as soon as it cannot change: all but an incomplete UTF-8 character at the end. A window of a few
    tokens is decoded again for each token, since a decoder may treat a text's first token in its own way (a
    leading space). `context` is the prompt: the answer's first token is decoded as what follows it.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = [token for token in context[-_CONTEXT:] if not tokenizer.is_special(token)]
        self._read = len(self._window)
        self._given = len(self._stable(tokenizer.decode(self._window)))

    def push(self, token: int) -> str:
        """Take one token; return the text that became certain, which may be empty."""
        if self._tokenizer.is_special(token):
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        certain = self._stable(text)
        if len(certain) == len(text):
            new = text[self._given :]
            if new:
                self._window = self._window[self._read :]
                self._read = len(self._window)
                self._given = len(self._tokenizer.decode(self._window))
            self._bound()
            return new
        if len(self._window) - self._read >= _HELD:
            # Not one long character but bytes that are no text: only the last of them may yet become one.
            certain = text[:-1]
        new = certain[self._given :]
        self._given = max(self._given, len(certain))
        self._bound()
        return new

    def _bound(self) -> None:
        """Keep the window short where no text becomes certain, so that each token costs the same."""
        if len(self._window) > 4 * _HELD:
            self._window = self._window[-_HELD:]
            self._read = 0
            text = self._tokenizer.decode(self._window)
            self._given = len(text) - text.endswith(_REPLACEMENT)

    def flush(self) -> str:
        """Return what was held back: an incomplete character, as U+FFFD."""
        text = self._tokenizer.decode(self._window)[self._given :]
        self._given += len(text)
        return text

    @staticmethod
    def _stable(text: str) -> str:
        return text.rstrip(_REPLACEMENT)


class StopScanner:
    """Finds the first of several stop strings in text that comes in pieces.

    The first to be complete ends the text; of two that end together the longer. How the text was cut into pieces
    makes no difference. Holds back only what a stop string may still begin with (Knuth-Morris-Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what can be given out, and the stop string that ended it, if one did."""
        if not self._stops:
            return text, None
        whole = self._held + text
        for place, char in enumerate(text, start=len(self._held) + 1):
            for index, stop in enumerate(self._stops):
                matched = self._step(index, stop, char)
                if matched == len(stop):
                    self._held = ""
                    return whole[: place - matched], stop
                self._matched[index] = matched
        cut = len(whole) - max(self._matched)
        self._held = whole[cut:]
        return whole[:cut], None

    def flush(self) -> str:
        """Return what was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _step(self, index: int, stop: str, char: str) -> int:
        matched = self._matched[index]
        while matched and stop[matched] != char:
            matched = self._borders[index][matched - 1]
        return matched + (stop[matched] == char)


def _borders(pattern: str) -> list[int]:
    """Return, for each prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for place in range(1, len(pattern)):
        while length and pattern[place] != pattern[length]:
            length = borders[length - 1]
        length += pattern[place] == pattern[length]
        borders[place] = length
    return borders


def _read(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: {error}") from error


def _token_text(value: object) -> str | None:
    """A special token is written as a string, or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_text(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template: chat_template.jinja if there is one, else tokenizer_config.json's."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: is not UTF-8: {error}") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = [item for item in template if isinstance(item, dict)]
        template = next((item.get("template") for item in named if item.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _compile(template: str) -> jinja2.Template:
    """Compile as transformers does: sandboxed, blocks trimmed, with the three names templates rely on."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )

    def refuse(message: str) -> str:
        raise jinja2.TemplateError(message)

    def to_json(value: object, indent: int | None = None) -> str:
        text = msgspec.json.encode(value)
        return (msgspec.json.format(text, indent=indent) if indent else text).decode()

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment.from_string(template)


def _added(core: tokenizers.Tokenizer) -> Mapping[int, tokenizers.AddedToken]:
    added: Mapping[int, tokenizers.AddedToken] = core.get_added_tokens_decoder()
    return added


def _decoder_json(core: tokenizers.Tokenizer) -> str:
    settings: dict[str, Any] = msgspec.json.decode(core.to_str())
    return msgspec.json.encode(settings.get("decoder")).decode()
