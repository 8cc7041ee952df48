"""Sources in an object store, read from a real server of S3 on loopback."""

import gzip
import hashlib
import json
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import s3fs
import yaml
import zstandard
from fsspec import __version__ as fsspec_version
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from demix.config.domains import SourceSection, check_source
from demix.data.fetch import fetch, stored
from demix.data.pins import pins
from demix.data.sources import Source, download, pinned
from demix.run.check import completed_run
from support.cli import demix, refusal, succeeds
from support.configs import small_run
from support.errors import refused

KEY, SECRET = "AKIAHUNTER2HUNTER222", "hunter2/secret+key"


@dataclass
class ObjectStore:
    """The address, and the method and the name of each request for the bucket `corpus` so far, as one word.

    A `broken` request gets the status 403. A request without a name lists.
    """

    address: str
    asked: list[str] = field(default_factory=list)
    broken: Callable[[str], bool] = lambda _: False

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.address,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def put(self, files: Mapping[str, bytes]) -> None:
        """Put these files into the bucket `corpus`."""
        client = self.client()
        for name, data in files.items():
            client.put_object(Bucket="corpus", Key=name, Body=data)

    def refuse_keys(self) -> None:
        """From now on take the keys of known users alone; there are none."""
        requests.post(f"{self.address}/moto-api/reset-auth", data=b"0", timeout=10).raise_for_status()

    @property
    def fetched(self) -> list[str]:
        """The names of the files that were asked for."""
        return [request.removeprefix("GET/") for request in self.asked if request.startswith("GET/")]

    def reset(self) -> None:
        """Empty the store but for a bucket `corpus`, and take any key."""
        self.broken = lambda _: False
        requests.post(f"{self.address}/moto-api/reset-auth", data=b"inf", timeout=10).raise_for_status()
        requests.post(f"{self.address}/moto-api/reset", timeout=10).raise_for_status()
        self.client().create_bucket(Bucket="corpus")
        self.asked.clear()


@contextmanager
def serving_store() -> Iterator[ObjectStore]:
    moto = DomainDispatcherApplication(create_backend_app)

    def answered(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        if not environ["PATH_INFO"].startswith("/corpus"):
            return moto(environ, start)
        request = environ["REQUEST_METHOD"] + environ["PATH_INFO"].removeprefix("/corpus").rstrip("/")
        store.asked.append(request)
        if not store.broken(request):
            return moto(environ, start)
        start("403 Forbidden", [("Content-Length", "0")])
        return []

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    server = make_server("127.0.0.1", 0, answered, threaded=True)
    store = ObjectStore(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()


DATA = bytes(hashlib.sha256(b"demix").digest()) * 300
AT = "s3://corpus/data.bin"


def lines(*texts: str) -> bytes:
    return "".join(json.dumps({"text": text, "set": text[0], "n": 1}) + "\n" for text in texts).encode()


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with serving_store() as store:
        yield store


@pytest.fixture
def store(server: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """The server with an empty bucket `corpus`; its address and keys are in the environment, as of a user."""
    server.reset()
    given = {
        "AWS_ENDPOINT_URL": server.address,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
        "HOME": str(tmp_path / "home"),
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    return server


@pytest.fixture
def files(store: ObjectStore, tmp_path: Path) -> Path:
    """A folder of files, all of which are in the bucket below texts/, too."""
    folder = tmp_path / "texts"
    (folder / "more").mkdir(parents=True)
    (folder / "_hidden").mkdir()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines("a one", "b two", "a three")))
    (folder / "b.jsonl.zst").write_bytes(zstandard.compress(lines("b four")))
    (folder / "more" / "c.jsonl").write_bytes(lines("a five", "a six seven", "b eight"))
    table = pa.Table.from_pylist([{"text": f"p {number}", "set": "ab"[number % 2], "n": 1} for number in range(7)])
    pq.write_table(table, folder / "more" / "d.parquet", row_group_size=2)
    (folder / "_hidden" / "e.jsonl").write_bytes(lines("hidden"))
    (folder / "README.md").write_bytes(b"no data")
    put = {f"texts/{path.relative_to(folder)}": path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    store.put(put | {"texts/": b""})
    store.asked.clear()
    return folder


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("texts", "a.jsonl.gz b.jsonl.zst more/c.jsonl more/d.parquet"),
        ("", "a.jsonl.gz b.jsonl.zst more/c.jsonl more/d.parquet"),
        ("texts/a.jsonl.gz", "a.jsonl.gz"),
        ("texts/*.jsonl.*", "a.jsonl.gz b.jsonl.zst"),
        ("texts/*", "README.md a.jsonl.gz b.jsonl.zst"),
        ("t*/[!_]*/?.jsonl", "more/c.jsonl"),
        ("texts/**/*.jsonl", "_hidden/e.jsonl more/c.jsonl"),
    ],
)
def test_a_path_a_glob_and_a_folder_name_files(files, path, found):
    assert stored([f"s3://corpus/{path}"] * 2) == [f"s3://corpus/texts/{name}" for name in found.split()]


@pytest.mark.parametrize(("parts", "words"), [(1, 6), (2, None), (5, 6)])
def test_the_raw_text_is_that_of_the_same_local_files(files, store, parts, words, tmp_path):
    for part in range(parts):
        here = Source(path=f"{files}", parts=parts, words=words)
        there = Source(path="s3://corpus/texts", parts=parts, words=words)
        output = tmp_path / "raw" / f"{part}.parquet"
        assert download(there, "d", output, part) == download(here, "d", tmp_path / "here" / output.name, part)
        assert output.read_bytes() == (tmp_path / "here" / output.name).read_bytes()
        assert output.stat().st_mode & 0o777 == 0o600
    assert len([*(tmp_path / "raw").iterdir()]) == parts, "nothing of what was fetched is left"
    if words and parts == 1:
        assert len(store.fetched) == 1, "later files are left alone"


def test_a_name_in_a_store_is_no_part_of_a_url(store, tmp_path):
    store.put({"a%20b?c#d::e.jsonl": lines("a"), "e/..": lines("b")})
    digests = {"a%20b?c#d::e.jsonl": hashlib.sha256(lines("a")).hexdigest()}
    assert download(Source(path="s3://corpus/a%*", sha256=digests), "d", tmp_path / "d" / "0") == 1
    with refused("s3://corpus/e/.."):
        download(Source(path="s3://corpus/e/*"), "d", tmp_path / "e" / "0")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["0"]


def test_an_error_names_the_object(store, tmp_path):
    store.put({"a/lang=en/e.jsonl": b"", "b/lang=e%2Fn/o.jsonl": b'{"body": "b"}\n'})
    for path, place in (("a", "lang=en/e.jsonl"), ("b", "lang=e%2Fn/o.jsonl, row 1")):
        with refused(f"s3://corpus/{path}/{place}"):
            download(Source(path=f"s3://corpus/{path}"), "d", tmp_path / "d" / "0")
    store.put({"b/lang=e%2Fn/o[1].jsonl": lines("a"), "b/lang=de/o.jsonl": lines("b"), "b/o.md": b""})
    there = Source(path=("s3://corpus/b/lang=de", "s3://corpus/b/lang=e%2Fn/o[1].jsonl"))
    assert download(there, "d", tmp_path / "d" / "0") == 2


def test_a_file_is_fetched_whole_or_not_at_all(store, tmp_path):
    store.put({"data.bin": DATA})
    store.broken = lambda request: request == "GET/data.bin"
    with refused(AT):
        fetch(AT, tmp_path / "f")
    assert not (tmp_path / "f").exists()
    store.broken = lambda _: False
    store.asked.clear()
    for _ in range(2):
        fetch(AT, tmp_path / "f", size=len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
    assert store.fetched == ["data.bin"], "a file that is there is not fetched again"
    assert (tmp_path / "f").read_bytes() == DATA

    def change(request: str) -> bool:
        if request == "GET/data.bin":
            store.put({"data.bin": DATA[::-1]})
        return False

    store.broken = change
    with refused(AT):
        fetch(AT, tmp_path / "g")
    assert [*tmp_path.iterdir()] == [tmp_path / "f"]


@pytest.mark.parametrize("wrong", [{"sha256": "0" * 64}, {"size": 9}])
def test_wrong_bytes_are_not_kept(store, tmp_path, wrong):
    store.put({"data.bin": DATA})
    with refused(AT):
        fetch(AT, tmp_path / "f", **wrong)
    assert [*tmp_path.iterdir()] == []
    assert bool(store.fetched) == ("sha256" in wrong), "a size is known before"


def test_digests_pin_the_files_and_their_list(files, store, tmp_path):
    source = Source(path="s3://corpus/texts/*.jsonl.*")
    assert pinned(source, 0) is None
    found = pins(source, tmp_path)
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files.glob("*.jsonl.*")}
    assert found == {"sha256": digests}
    source = Source(path=source.path, **found)
    assert (pinned(source, 0), pins(source, tmp_path)) == ([], {})
    assert download(source, "d", tmp_path / "raw" / "0.parquet") == 4
    store.put({"texts/new.jsonl.gz": b""})
    with refused("d.source.sha256"):
        download(source, "d", tmp_path / "raw" / "0.parquet")
    with refused("d.source.sha256.b.jsonl.zst"):
        download(Source(path="s3://corpus/texts/a*", **found), "d", tmp_path / "raw" / "0.parquet")


def failed(path: str, folder: Path, **keys: Any) -> str:
    """The line of `demix download`, which names the path; nothing of the source is written, and no credential."""
    settings = json.dumps({"path": path} | keys)
    output = folder / "raw" / "0000.parquet"
    line = refusal("download", "d", "--settings", settings, "--output", output, of=path)
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    # Of what a library says, the name of the error and its code are shown.
    assert re.search(rf": {re.escape(path)}: [a-z, ]+(\(\w+(: \w+)?\))?; ", line), line
    return line


@pytest.mark.parametrize(
    "path",
    ["corpus/none.jsonl", "corpus/none/*.jsonl", "corpus/n*.jsonl", "none/*.jsonl", "none/**/a.jsonl", "none/a.jsonl"],
)
def test_a_path_that_names_nothing_is_refused(store, tmp_path, path):
    store.put({"a.jsonl": lines("a")})
    assert failed(f"s3://{path}", tmp_path, instructions="ask its owner").endswith("; ask its owner")


@pytest.mark.parametrize("keys", ["wrong", "none"])
def test_wrong_and_missing_credentials_are_not_shown(store, tmp_path, keys, monkeypatch, caplog, capfd):
    store.put({"a.jsonl": lines("a")})
    store.refuse_keys()
    if keys == "none":
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    for path in ("*.jsonl", "", "a.jsonl", "**/a.jsonl"):
        line = failed(f"s3://corpus/{path}", tmp_path)
        assert "AWS_SECRET_ACCESS_KEY" in line, "the variable is named, not its value"
        shown = line + caplog.text + "".join(capfd.readouterr())
        assert not [secret for secret in (KEY, SECRET) if secret in shown]


def test_an_error_shows_nothing_of_what_a_library_says(tmp_path, store, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hunter2@127.0.0.1:1")
    assert "hunter" not in failed("s3://corpus/a.jsonl", tmp_path)


def test_a_listing_that_fails_within_a_glob_is_no_empty_folder(store):
    store.put({"x/a.jsonl": lines("a"), "y/b.jsonl": lines("b")})
    store.broken = lambda request: request == "GET"
    with refused("s3://corpus/*/*.jsonl"):
        stored(["s3://corpus/*/*.jsonl"])


def test_no_credential_gets_into_a_file_or_a_log(files, tmp_path, caplog, capfd):
    settings = json.dumps({"path": "s3://corpus/texts"})
    run = tmp_path / "results" / "mine"
    outputs = ("--output", run / "d" / "0000.parquet", "--counts", run / "d" / "0000.json")
    with caplog.at_level("DEBUG"):
        done = demix("read", "d", "--settings", settings, "--raw", run / "raw" / "0000.parquet", *outputs)
    assert done.exit_code == 0, done.output
    assert pq.read_metadata(run / "d" / "0000.parquet").num_rows == 14
    written = [path.read_bytes() for path in run.rglob("*") if path.is_file()]
    assert len(written) == 2
    mine = "".join(record.getMessage() for record in caplog.records if record.name.startswith("demix"))
    shown = (done.output + mine + "".join(capfd.readouterr())).encode()
    assert not [text for text in [shown, *written] for secret in (KEY, SECRET) if secret.encode() in text]


def test_a_missing_library_is_named_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "adlfs", None)
    assert failed("az://corpus/a.jsonl", tmp_path).endswith(f"; pip install adlfs fsspec=={fsspec_version}")


def with_store(**keys: Any) -> dict[str, Any]:
    source = {"path": "s3://corpus/*.jsonl"} | keys
    domain = {"source": source, "words": {"dev": 10, "test": 10}}
    return {"training": {"law": domain, "news": domain}, "novel": {}}


def test_a_plan_asks_no_store(store, tmp_path):
    run = small_run(tmp_path, domains=with_store(path="s3://corpus/my texts/*.jsonl", parts=4))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(run.config.values))
    succeeds("plan", tmp_path / "mine.yaml")
    assert store.asked == []


@pytest.mark.parametrize(
    "path",
    [
        "s3:///a.jsonl",
        "s3://b*/a.jsonl",
        "ftp://host/a.jsonl",
        ["s3://corpus/a.jsonl", "https://host/a.jsonl"],
        ["a.jsonl", "http://host/a.jsonl"],
        f"s3://{KEY}:{SECRET}@corpus/a.jsonl",
        "s3://hunter2@corpus/a.jsonl",
        "az://corpus/a.jsonl?sig=hunter2",
    ],
)
def test_wrong_addresses_are_refused(path):
    with refused("key.path") as caught:
        check_source("key", SourceSection(path=path))
    assert "hunter2" not in str(caught.value).lower()


def test_a_key_of_a_config_holds_no_credential(tmp_path):
    with refused("domains.training.law.source.secret") as caught:
        completed_run({**small_run(tmp_path).config.values, "domains": with_store(secret=SECRET)})
    assert SECRET not in str(caught.value)
