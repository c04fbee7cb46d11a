"""What is no document, too large a document, and methods that break: clear errors, and nothing half kept."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megamcp.client import MegaMCPError, Rollout, TooLarge, Unprocessable, UpstreamError
from tests.integration.documents.conftest import SERVER, Library


async def unharmed(rollout: Rollout) -> bool:
    return bool((await rollout.call("all")).value == {"things": {"first": "seeded", "x": "1"}, "count": 1})


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("set", "/things/bad/0/here is a set"),
        ("tuple", "/things/bad/0/here is a tuple"),
        ("nan", "/things/bad/0/here is nan"),
        ("key", "/things/bad/0/here has a key 1 that is an int"),
        ("big", "/things/bad/0/here is an integer of more than 64 bits"),
        ("bytes", "/things/bad/0/here is a bytes"),
        ("surrogate", "/things/bad/0/here holds text with a lone surrogate"),
        ("object", "/things/bad/0/here is an object"),
        ("loop", "nested too deeply, or holds itself"),
    ],
)
async def test_what_is_no_json_is_refused_by_its_place(library: Library, how: str, said: str) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("put", key="x", value="1")
    refused = await rollout.call("spoil", how=how)
    assert refused.is_error
    assert refused.code == "invalid_document"
    assert said in refused.text
    assert await unharmed(rollout)


async def test_a_document_over_the_limit_is_refused(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("put", key="x", value="1")
    refused = await rollout.call("fill", count=4, size=1 << 20)
    assert refused.code == "document_too_large"
    assert "3145728" in refused.text
    assert refused.text.startswith("shelf: "), "the server's name"
    assert await unharmed(rollout)
    assert not (await rollout.call("fill", count=2, size=1 << 20)).is_error


async def test_a_dump_that_raises_keeps_nothing(library: Library) -> None:
    rollout = await library.client.open("tower")
    refused = await rollout.call("tower__crack")
    assert refused.code == "document_failed"
    assert "the dump is broken" in refused.text
    assert (await rollout.call("tower__floors")).value == ["first", "ground"]
    assert not (await rollout.call("tower__build", name="a")).is_error


async def test_a_read_only_method_that_writes_is_told_and_kept_from_it(library: Library) -> None:
    rollout = await library.client.open("shelf")
    await rollout.call("put", key="x", value="1")
    assert (await rollout.call("sneak", key="y")).code == "changed_by_reading"
    assert await unharmed(rollout)


async def load(
    library: Library, folder: Path, text: str, code: str | None = None, progress: Callable[..., None] | None = None
) -> None:
    (folder / "environment.toml").write_text(text)
    (folder / "shelf_server.py").write_text(code or SERVER.read_text())
    await library.client.load_environment(folder, progress=progress)


STATE = '[servers.bad.state]\nkind = "document"\n'


async def test_another_programs_document_is_refused_at_load(library: Library, tmp_path: Path) -> None:
    with pytest.raises(Unprocessable, match="other programs keep state of kind process"):
        await load(library, tmp_path, f'name = "bad"\n[servers.bad]\ncommand = "cat"\n{STATE}')


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", r"initial\.json: .* \(servers\.bad\.state\.initial\)"),
        ('{"a": 1e999}', r"servers\.bad"),
        (f'{{"a": {2**70}}}', "64 bits"),
        (f'["{"x" * (4 << 20)}"]', r"servers\.bad: The document has 4194310 bytes, the limit is 3145728\."),
    ],
    ids=["cut", "infinity", "integer", "large"],
)
async def test_a_first_document_that_is_no_json_is_refused_at_load(
    library: Library, tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "initial.json").write_text(content)
    text = f'name = "bad"\n[servers.bad]\nentry = "shelf_server:Shelf"\n{STATE}initial = "initial.json"\n'
    with pytest.raises((Unprocessable, TooLarge), match=said):
        await load(library, tmp_path, text)


async def test_a_class_that_can_be_no_server_says_why(library: Library, tmp_path: Path) -> None:
    code = "class Shelf:\n    def put(self, key) -> None: ...\n"
    text = f'name = "untyped"\n[servers.bad]\nentry = "shelf_server:Shelf"\n{STATE}'
    told: list[str] = []
    await load(library, tmp_path, text, code, lambda what, *_: told.append(what))
    assert "is loaded, but bad does not work yet" in told[-1]
    assert "parameter 'key' needs a type annotation" in told[-1]
    with pytest.raises(UpstreamError, match="parameter 'key' needs a type annotation"):
        await (await library.client.open("untyped")).call("put", key="x")


async def test_a_class_whose_first_document_is_none_says_so(library: Library, tmp_path: Path) -> None:
    code = (
        "class Shelf:\n    def __init__(self):\n        self.seen = {1}\n    def look(self) -> int:\n        return 1\n"
    )
    await load(library, tmp_path, f'name = "setlike"\n[servers.bad]\nentry = "shelf_server:Shelf"\n{STATE}', code)
    refused = await (await library.client.open("setlike")).call("look")
    assert refused.code == "invalid_document"
    assert "/seen is a set" in refused.text


async def test_a_first_document_that_the_class_cannot_load_says_so(library: Library, tmp_path: Path) -> None:
    (tmp_path / "initial.json").write_text('{"walls": 4}')
    text = f'name = "walls"\n[servers.bad]\nentry = "shelf_server:Tower"\n{STATE}initial = "initial.json"\n'
    told: list[str] = []
    await load(library, tmp_path, text, progress=lambda what, *_: told.append(what))
    assert "bad does not work yet: bad: the document that it is to start as (state.initial)" in told[-1]
    assert "can't be loaded: KeyError: 'floors'" in told[-1]
    refused = await (await library.client.open("walls")).call("floors")
    assert refused.code == "document_failed"
    assert "load failed: KeyError: 'floors'" in refused.text


async def test_an_environment_whose_load_is_watched_is_tried_out(library: Library, tmp_path: Path) -> None:
    (tmp_path / "initial.json").write_text('{"floors": [["cellar", 0]]}')
    text = f'name = "cellar"\n[servers.good]\nentry = "shelf_server:Tower"\n{STATE}initial = "initial.json"\n'
    told: list[str] = []
    await load(library, tmp_path, text.replace("bad", "good"), progress=lambda what, *_: told.append(what))
    assert told == ["good: its server is started"]
    assert (await (await library.client.open("cellar")).call("floors")).value == ["cellar"]


async def test_a_plain_class_without_a_state_is_refused_call_by_call(library: Library, tmp_path: Path) -> None:
    await load(library, tmp_path, 'name = "stateless"\n[servers.bad]\nentry = "shelf_server:Shelf"\n')
    with pytest.raises(MegaMCPError, match="has to say that its state is of kind document"):
        await (await library.client.open("stateless")).call("put", key="x", value="1")
