"""The hook as an adapter implements it: torch tensors on the CPU, written by operations that look like engines' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from regauge.engines.probe import Cache, probe, storage_bytes
from regauge.errors import EngineError
from regauge.layout.engines import from_engine_form
from regauge.layout.presets import attention_model
from regauge.layout.probe.codes import Bytes, Floats
from regauge.layout.spec import Array, Kind, Layout, Placement

pytestmark = pytest.mark.model

HEADS, DIM, PAGE, PAGES, LAYERS = 2, 32, 32, 4, 3
MODEL = attention_model("m", LAYERS, Array(HEADS, DIM))


class VllmCpu:
    """As vLLM 0.32 allocates its CPU cache, all layers in one storage, and as its AVX2 kernel writes it: K transposed."""

    dtype = "bfloat16"
    usable: Mapping[int, Sequence[int]] = {0: range(1, PAGES)}  # block 0 is the null block

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.storage = torch.zeros(LAYERS, PAGES, HEADS, PAGE, 2 * DIM, dtype=torch.bfloat16)

    def fill(self, byte: int) -> None:
        storage_bytes(self.storage)[:] = byte

    def read(self) -> Mapping[str, Bytes]:
        return {"kv": storage_bytes(self.storage[1])}  # a view of one layer has the bytes of all

    def write(self, kind: Kind, layer: int, pages: npt.NDArray[np.int64], values: Mapping[str, Floats]) -> None:  # noqa: ARG002  # the hook says so
        k, v = (torch.from_numpy(values[name]).to(torch.bfloat16) for name in ("k", "v"))
        for token in range(len(k)):
            block, offset = int(pages[token // PAGE]), token % PAGE
            flat = self.storage[layer, block].view(HEADS, -1)
            for head in range(HEADS):
                flat[head, : DIM * PAGE].view(DIM, PAGE)[:, offset] = k[token, head]
                flat[head, DIM * PAGE :].view(PAGE, DIM)[offset] = v[token, head]


class SglangNhd:
    """As SGLang's `MHATokenToKVPool`: a K and a V tensor per layer, indexed by slot, in codes of the cache's dtype."""

    dtype = "bfloat16"
    usable: Mapping[int, Sequence[int]] = {0: range(1, PAGES)}  # slots of page 0 are the dummy's

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        names = [f"{n}.{layer}" for layer in range(LAYERS) for n in "kv"]
        self.tensors = {n: torch.zeros(PAGES * PAGE, HEADS, DIM, dtype=torch.float8_e4m3fn) for n in names}

    def fill(self, byte: int) -> None:
        for tensor in self.tensors.values():
            storage_bytes(tensor)[:] = byte

    def read(self) -> Mapping[str, Bytes]:
        return {name: storage_bytes(tensor) for name, tensor in self.tensors.items()}

    def write(self, kind: Kind, layer: int, pages: npt.NDArray[np.int64], values: Mapping[str, Floats]) -> None:  # noqa: ARG002  # the hook says so
        for name, array in values.items():
            slots = [int(pages[t // PAGE]) * PAGE + t % PAGE for t in range(len(array))]
            codes = torch.from_numpy(array).to(torch.bfloat16).to(torch.float8_e4m3fn)
            self.tensors[f"{name}.{layer}"].view(torch.uint8)[slots] = codes.view(torch.uint8)


def test_vllm_cpu_pool_is_as_the_preset_says_and_not_as_its_shape_says() -> None:
    preset = from_engine_form(f"engine:vllm,pool=cpu,page={PAGE},dtype=auto,model-dtype=bfloat16,pages={PAGES}", MODEL)
    engine: Cache = VllmCpu(preset)
    verdict = probe(engine)
    assert verdict.verified, verdict.first
    assert verdict.covered[0].pages == (3, 1, 2)
    group = preset.groups[0]
    shape = [msgspec.structs.replace(c, at=Placement("layer page head token kv dim")) for c in group.components]
    said = msgspec.structs.replace(preset, groups=[msgspec.structs.replace(group, components=shape)])
    first = probe(engine, said).first
    assert first is not None
    assert (first.array, first.token, first.head, first.dim) == ("k", 0, 0, 1)
    assert first.looks_like == ("order 'layer page head kv dim token'",)


def test_sglang_pool_is_as_the_preset_says() -> None:
    preset = from_engine_form(f"engine:sglang,pool=nhd,page={PAGE},dtype=fp8_e4m3,pages={PAGES}", MODEL)
    verdict = probe(SglangNhd(preset))
    assert verdict.verified, verdict.first
    head_first = from_engine_form(f"engine:sglang,pool=hnd,page={PAGE},dtype=fp8_e4m3,pages={PAGES}", MODEL)
    first = probe(SglangNhd(head_first)).first
    assert first is not None
    assert first.looks_like == ("axes head and token swapped: order 'page token head dim'",)


def test_page_ids_of_another_page_size_are_found_even_where_the_bytes_of_a_pool_are_the_same() -> None:
    """Slots of an nhd pool are in the same order for any page size; what a page number means is not."""
    smaller = from_engine_form(f"engine:sglang,pool=nhd,page={PAGE // 2},dtype=fp8_e4m3,pages={PAGES}", MODEL)
    first = probe(SglangNhd(smaller)).first
    assert first is not None
    assert first.looks_like == (f"page size {PAGE}",)


def test_storage_bytes_are_those_of_the_storage_whatever_the_tensor_says() -> None:
    base = torch.arange(12, dtype=torch.int16)
    view = base.reshape(3, 4).t()[1:]
    assert storage_bytes(view).tobytes() == base.numpy().tobytes()
    storage_bytes(view)[:2] = 255
    assert base[0] == -1
    with pytest.raises(EngineError, match="copy it to the host first"):
        storage_bytes(torch.zeros(2, device="meta"))
