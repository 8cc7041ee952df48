"""`demix pin`: digests and commits, ready to paste into a config; and revisions that can move."""

import copy
import hashlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from socket import socket
from typing import Any

import huggingface_hub.constants
import pytest
import yaml

from demix.commands.main import command_line
from demix.errors import DemixError
from demix.run.check import completed_run, load_run
from support.server import serving_folder

CONFIG = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = {"kind": "hub", "path": "owner/name", "revision": "main", "data_files": ["*.parquet"]}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of two files, and of a hub whose data set owner/name has one branch."""
    files = {
        "a.jsonl": "a",
        "b.jsonl": "b",
        "api/datasets/owner/name/revision/main": {"id": "owner/name", "sha": COMMIT},
    }
    for name, content in files.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(json.dumps(content))
    with serving_folder(tmp_path / "site") as address:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        yield address


def with_sources(**sources: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    for name, source in sources.items():
        config["domains"]["novel" if name == "fantasy" else "training"][name]["source"] = source
    config["domains"]["novel"].pop("fortunes")
    return config


def pin(config: dict[str, Any]) -> Any:
    Path("config.yaml").write_text(yaml.safe_dump(config))
    return command_line()(["pin", "config.yaml"], standalone_mode=False)


def test_what_is_printed_pins_every_source(site: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("fortunes", "licenses"):
        Path(f"{name}.jsonl").write_text(name)
    pin(
        with_sources(
            parliament={"kind": "url", "path": [f"{site}/a.jsonl", f"{site}/b.jsonl"]},
            scripture=HUB,
            licenses={"kind": "files", "path": "*.jsonl"},
            fantasy={"kind": "files", "path": "licenses.jsonl"},
        )
    )
    printed = capsys.readouterr().out

    def digests(**contents: str) -> dict[str, Any]:
        return {
            "source": {
                "sha256": {
                    f"{name}.jsonl": hashlib.sha256(content.encode()).hexdigest() for name, content in contents.items()
                }
            }
        }

    assert yaml.safe_load(printed)["domains"] == {
        "training": {
            "parliament": digests(a='"a"', b='"b"'),
            "scripture": {"source": {"revision": COMMIT}},
            "licenses": digests(fortunes="fortunes", licenses="licenses"),
        },
        "novel": {"fantasy": digests(licenses="licenses")},
    }
    Path("pinned.yaml").write_text("base: config.yaml\n" + printed)
    assert load_run("pinned.yaml").domains["scripture"].source.revision == COMMIT
    command_line()(["pin", "pinned.yaml"], standalone_mode=False)
    assert capsys.readouterr().out == ""
    assert not [path for path in Path("results").rglob("*") if path.is_file()]


def test_what_cannot_be_read_is_named_beside_the_rest(
    site: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    licenses = {"kind": "files", "path": "none.jsonl", "instructions": "ask its owner"}
    fantasy = {"kind": "url", "path": f"{site}/a.jsonl"}
    parliament = HUB | {"path": "owner/none"}
    config = with_sources(parliament=parliament, licenses=licenses, scripture=HUB, fantasy=fantasy)
    with caplog.at_level(logging.ERROR):
        assert pin(config) == 1
    found = yaml.safe_load(capsys.readouterr().out)["domains"]
    assert (list(found["training"]), list(found["novel"])) == (["scripture"], ["fantasy"])
    assert "licenses: source.path: no file matches 'none.jsonl'; ask its owner" in caplog.text
    assert "parliament: data set owner/none: cannot be read" in caplog.text


def test_a_source_that_is_not_there_ends_no_other(site: str, capsys: pytest.CaptureFixture[str]) -> None:
    none, there = ({"kind": "url", "path": f"{site}/{name}.jsonl"} for name in ("none", "a"))
    config = with_sources(parliament=none, scripture=HUB, fantasy=there)
    assert pin(config) == 1
    assert "scripture" in yaml.safe_load(capsys.readouterr().out)["domains"]["training"]


@pytest.mark.parametrize("kind", ["hub", "url"])
def test_without_a_network_one_line_says_so(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the command itself, at a port where nobody listens, before each source tries by itself, for minutes."""
    monkeypatch.chdir(tmp_path)
    with closing(socket()) as held:
        held.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{held.getsockname()[1]}"
        url = {"kind": "url", "path": f"{nobody}/a.jsonl"}
        first, second = (HUB, url) if kind == "hub" else (url, HUB)
        config = with_sources(parliament=first, scripture=second, fantasy=second)
        Path("config.yaml").write_text(yaml.safe_dump(config))
        done = subprocess.run(
            [sys.executable, "-m", "demix", "pin", "config.yaml"], env=os.environ | {"HF_ENDPOINT": nobody},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    asked = nobody if kind == "hub" else url["path"]
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"demix: error: {asked}: does not answer (")
    assert "refused" in line
    assert line.endswith("); mend the network, or name a proxy (export HTTPS_PROXY=…), then rerun")
    assert not [path for path in Path("results").rglob("*") if path.is_file()]


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/convert/parquet", COMMIT[:7], COMMIT.upper()])
def test_a_revision_that_can_move_must_be_allowed(revision: str) -> None:
    config = with_sources(fantasy=HUB | {"revision": revision})
    with pytest.raises(DemixError, match=r"novel\.fantasy\.source\.revision: is .* no commit.*`demix pin CONFIG`"):
        completed_run(config)
    assert completed_run(config | {"allow_branches": True}).config.allow_branches
    completed_run(with_sources(fantasy=HUB | {"revision": COMMIT}))
