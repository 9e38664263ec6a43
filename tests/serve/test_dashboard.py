"""The live page's files: who gets them, with which headers, and nothing beside them."""

import re
from importlib.resources import files

import aiohttp
import pytest
from serve_rig import Rig, open_rig

from regauge.serve.dashboard import FILES, POLICY
from regauge.serve.text import Tokenizer

PAGE = files("regauge.serve") / "page"


async def get(rig: Rig, path: str, **headers: str) -> tuple[int, aiohttp.typedefs.CIMultiDictProxy[str], str]:
    async with aiohttp.ClientSession() as session, session.get(f"{rig.base}{path}", headers=headers) as answer:
        return answer.status, answer.headers, await answer.text()


@pytest.mark.anyio
async def test_the_page_and_its_files(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        for path, kind in {"": "text/html", **{f"/{name}": kind for name, kind in FILES.items()}}.items():
            status, headers, text = await get(rig, f"/dashboard{path}")
            assert (status, headers["content-type"].partition(";")[0]) == (200, kind), path
            assert headers["content-security-policy"] == POLICY
            assert headers["x-content-type-options"] == "nosniff"
            assert text


@pytest.mark.anyio
@pytest.mark.parametrize(
    "name", ["../operations.py", "..%2foperations.py", "uplot/LICENSE", "index.html", "nothing", "%2fetc%2fpasswd"]
)
async def test_what_is_no_file_of_the_page_is_not_there(name: str, tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        assert (await get(rig, f"/dashboard/{name}"))[0] == 404


@pytest.mark.anyio
async def test_it_is_for_this_machine_alone(tokenizer: Tokenizer) -> None:
    async with open_rig(tokenizer) as rig:
        for path in ("/dashboard", "/dashboard/main.js"):
            status, _, text = await get(rig, path, **{"X-Forwarded-For": "10.1.2.3"})
            assert (status, "loopback_only" in text) == (403, True)


def test_the_page_names_its_files_alone_and_nothing_from_elsewhere() -> None:
    index = PAGE.joinpath("index.html").read_text()
    named = set(re.findall(r'(?:src|href)="dashboard/([^"]+)"', index))
    imported = {
        m
        for name in FILES
        if name.endswith(".js")
        for m in re.findall(r'from "\./([^"]+)"', PAGE.joinpath(name).read_text())
    }
    assert named | imported == set(FILES)
    assert not re.search(r"https?://", index)
    assert "style=" not in index
    assert "onclick" not in index
