"""`demix import hub:…` against a server that speaks the hub's protocol: what is fetched, checked and refused."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import huggingface_hub.constants
import pytest

from demix.errors import DemixError
from demix.model.directory import describe
from demix.model.import_hf import INDEX, WEIGHTS, import_hf, import_hub
from support.checkpoints import change, checkpoint
from support.cli import refusal
from support.errors import refused
from support.server import Handler, serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ADDRESS = f"hub:owner/name@{COMMIT}"
TOKEN = "hf_secret"


@dataclass
class Hub:
    """A hub whose model owner/name has the files of `folder`; large files lie at another address, as the hub's do.

    `cut` are files that are sent by half until a part is asked for, `absent` are listed and not there, `wrong` are sent
    with their last byte changed.
    """

    folder: Path
    address: str = ""
    files: str = ""
    cut: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    got: list[tuple[str, str]] = field(default_factory=list)
    gated: bool = False
    agents: set[str] = field(default_factory=set)
    tokens: set[tuple[str, str | None]] = field(default_factory=set)

    def told(self) -> dict[str, object]:
        siblings = []
        for path in sorted(self.folder.iterdir()):
            data = path.read_bytes()
            # The blob of a large file holds its digest.
            blob = hashlib.sha1(b"blob %d\0" % len(data) + data if not _large(path.name) else b"").hexdigest()
            lfs = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 1}
            siblings.append(
                {"rfilename": path.name, "size": len(data), "blobId": blob}
                | ({"lfs": lfs} if _large(path.name) else {})
            )
        return {"id": "owner/name", "sha": COMMIT, "gated": self.gated and "manual", "siblings": siblings}

    def answer(self, handler: Handler, number: int) -> None:
        path = handler.path.partition("?")[0]
        self.tokens.add(("hub", handler.headers.get("Authorization")))
        if path in [f"/api/models/owner/name{end}" for end in ("", "/revision/main", f"/revision/{COMMIT}")]:
            self.agents.add(handler.headers["User-Agent"])
            handler.send(json.dumps(self.told()).encode(), Content_Type="application/json")
        elif path.startswith(root := f"/owner/name/resolve/{COMMIT}/"):
            name = path.removeprefix(root)
            if _large(name) and name not in self.absent:
                handler.send(b"", 302, Location=f"{self.files}/{name}?X-Amz-Signature=secret")
            else:
                self.file(handler, name)
        else:
            handler.send(b"none", 404, X_Error_Code="RepoNotFound")

    def large(self, handler: Handler, number: int) -> None:
        self.tokens.add(("files", handler.headers.get("Authorization")))
        self.file(handler, handler.path.partition("?")[0].removeprefix("/"))

    def file(self, handler: Handler, name: str) -> None:
        begin = int((handler.headers.get("Range") or "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        self.got.append((name, "rest" if begin else "whole"))
        if name in self.absent:
            handler.send(b"none", 404)
            return
        data = (self.folder / name).read_bytes()
        if name in self.wrong:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if begin:
            handler.send(data[begin:], 206, Content_Range=f"bytes {begin}-{len(data) - 1}/{len(data)}")
        else:
            handler.send(data, stop=len(data) // 2 if name in self.cut else None)


def _large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


@pytest.fixture
def hub(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A model in several files with pickles, code and a README beside them."""
    hub = Hub(tmp_path / "site")
    checkpoint(hub.folder, tokens, "llama", shard="40KB")
    for name in ("pytorch_model.bin", "training_args.bin", "model.pt", "modeling.py", "README.md", "tf_model.h5"):
        (hub.folder / name).write_bytes(b"never")
    with serving(hub.answer) as site, serving(hub.large) as files:
        hub.address, hub.files = site.address, files.address
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", site.address)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            site.address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.chdir(tmp_path)
        yield hub


def files(model: Path) -> dict[str, bytes]:
    """The files of a model but for its descriptions, which say where it is from."""
    paths = [path for path in model.rglob("*") if path.is_file() and path.name not in ("model.json", "dense.json")]
    return {str(path.relative_to(model)): path.read_bytes() for path in paths}


def test_a_model_in_several_files_is_that_of_its_folder(hub: Hub) -> None:
    shards = sorted(path.name for path in hub.folder.glob("*.safetensors"))
    assert len(shards) > 2
    hub.cut = {shards[1], "tokenizer.json"}
    import_hub(ADDRESS, Path("imported/x"))
    import_hf(hub.folder, Path("folder"))
    assert files(Path("imported/x")) == files(Path("folder"))
    found, of_folder = (describe(Path(place)).content for place in ("imported/x", "folder"))
    origin = {"repository": "owner/name", "revision": COMMIT}
    # The digest of an expert's manifest, which names the origin, is another.
    assert found == of_folder | {"imported": of_folder["imported"] | origin, "experts": found["experts"]}
    # Each is fetched once, and goes on where it was cut off.
    kept = ["config.json", "generation_config.json", "tokenizer.json", INDEX, *shards]
    wanted = [(name, "whole") for name in kept] + [(name, "rest") for name in hub.cut]
    assert sorted(hub.got) == sorted(wanted)
    assert [path.name for path in Path("imported").iterdir()] == ["x"]


def test_the_command_tells_nobody_who_imports_and_no_file_server_the_token(hub: Hub, tokens: Path) -> None:
    shutil.rmtree(hub.folder)
    checkpoint(hub.folder, tokens, "gpt2")
    done = subprocess.run(
        [sys.executable, "-m", "demix", "import", ADDRESS, "--output", "x"],
        env=os.environ | {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [name for name, _ in hub.got][-1] == WEIGHTS
    assert hub.tokens == {("hub", f"Bearer {TOKEN}"), ("files", None)}
    assert not [agent for agent in hub.agents if "torch" in agent or "telemetry" in agent]
    assert not [secret for secret in (TOKEN, "secret") if secret in done.stdout + done.stderr]


@pytest.mark.parametrize("revision", ["", "@main"])
def test_a_revision_that_can_move_is_refused_with_its_commit(hub: Hub, revision: str) -> None:
    assert ADDRESS in refusal("import", f"hub:owner/name{revision}", "--output", "x", of="hub:owner/name@main")
    assert (hub.got, [path.name for path in Path().iterdir()]) == ([], ["site"])


@pytest.mark.parametrize("how", ["absent", "wrong"])
@pytest.mark.parametrize("end", ["00002-of", "config.json"])
def test_a_file_that_is_missing_or_of_another_digest_is_refused_and_fetched_again(hub: Hub, how: str, end: str) -> None:
    name = next(path.name for path in sorted(hub.folder.iterdir()) if end in path.name)
    setattr(hub, how, {name})
    with refused(name):
        import_hub(ADDRESS, Path("x"))
    assert not Path("x").exists()
    fetched = {name for name, _ in hub.got} - {name}
    hub.absent, hub.wrong, hub.got = set(), set(), []
    import_hub(ADDRESS, Path("x"))
    assert fetched.isdisjoint(name for name, _ in hub.got)
    assert describe(Path("x")).content["imported"]["revision"] == COMMIT


def test_what_cannot_come_in_is_refused_before_weights_are_fetched(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    other = f"hub:../../name@{COMMIT}"
    for address, subject in (
        (f"hub:owner/none@{COMMIT}", "model owner/none"),
        (f"hub:owner/name@{'f' * 40}", "model owner/name"),
        (other, other),
        ("hub:", "hub:"),
    ):
        with refused(subject):
            import_hub(address, Path("x"))
    hub.gated = True
    with refused("model owner/name"):
        import_hub(ADDRESS, Path("x"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    index = json.loads((hub.folder / INDEX).read_text())
    for name in ("pytorch_model.bin", "../../x.safetensors"):
        weights = dict.fromkeys(index["weight_map"], name)
        (hub.folder / INDEX).write_text(json.dumps(index | {"weight_map": weights}))
        with pytest.raises(DemixError) as error:
            import_hub(ADDRESS, Path(f"x{len(name)}"))
        assert f"{INDEX}: weight_map." in error.value.subject
    # A model of pickles alone.
    for path in [*hub.folder.glob("*.safetensors"), hub.folder / INDEX]:
        path.unlink()
    with refused("model owner/name"):
        import_hub(ADDRESS, Path("pickles"))
    change(hub.folder, sliding_windows=5)
    with refused("sliding_windows"):
        import_hub(ADDRESS, Path("y"))
    (hub.folder / "config.json").unlink()
    with refused("config.json"):
        import_hub(ADDRESS, Path("z"))
    assert not [name for name, _ in hub.got if _large(name)]


def test_a_hub_out_of_reach_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for address in (ADDRESS, "hub:owner/name"):
        with refused("model owner/name"):
            import_hub(address, tmp_path / "x")
    assert not [*tmp_path.iterdir()]
