"""Files of addresses, from real servers on loopback that fail in every way that servers do, and what pins them."""

import base64
import gzip
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pyarrow.parquet as pq
import pytest
import yaml

from demix.config.addresses import secret_in
from demix.data.fetch import ATTEMPTS, fetch
from demix.data.sources import Source, download
from demix.run.check import completed_run, load_run
from support.cli import demix, refusal, said
from support.dry_run import TINY, changed
from support.errors import refused
from support.server import Answer, Handler, Site, serving, serving_folder

DATA = bytes(hashlib.sha256(b"demix").digest()) * 5_000
NEW = DATA[::-1]
HALF = len(DATA) // 2
SHA256 = hashlib.sha256(DATA).hexdigest()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = {"path": "hf://owner/name", "revision": "main", "data_files": ["*.parquet"]}


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Site]]:
    with ExitStack() as servers:
        yield lambda answer: servers.enter_context(serving(answer))


def get(site: Site, path: Path, **options: object) -> None:
    fetch(f"{site.address}/data.bin", path, backoff=0.001, **({"timeout": 5} | options))


def ranged(handler: Handler, data: bytes = DATA, etag: str = '"one"', stop: int | None = None) -> None:
    """What a good server does with Range and If-Range."""
    wanted = handler.headers.get("Range")
    if wanted and handler.headers.get("If-Range") == etag:
        start = int(wanted.removeprefix("bytes=").removesuffix("-"))
        handler.send(data[start:], 206, stop, ETag=etag, Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")
    else:
        handler.send(data, stop=stop, ETag=etag)


def cut(then: Callable[[Handler], None] = ranged, **headers: str) -> Answer:
    """The first answer ends after half of the file, the second one is `then`, and all others are good."""

    def answer(handler: Handler, number: int) -> None:
        if number == 1:
            handler.send(DATA, stop=HALF, **headers)
        else:
            (then if number == 2 else ranged)(handler)

    return answer


def part(span: str, data: bytes) -> Answer:
    """After the first half comes `data` as the range `span`, whatever was asked for."""
    return cut(lambda handler: handler.send(data, 206, Content_Range=span))


def first(answer: Callable[[Handler], None], times: int = 1) -> Answer:
    """So many answers of this kind, then good ones."""
    return lambda handler, number: (answer if number <= times else ranged)(handler)


def another_version(handler: Handler, number: int) -> None:
    """After the first half, the range of another version, although If-Range names the first one."""
    if number == 1:
        ranged(handler, stop=HALF)
    elif number == 2:
        handler.send(NEW[HALF:], 206, ETag='"two"', Content_Range=f"bytes {HALF}-{len(NEW) - 1}/{len(NEW)}")
    else:
        ranged(handler, NEW, '"two"')


END, TOTAL = len(DATA) - 1, len(DATA)


@pytest.mark.parametrize(
    ("answer", "requests", "data"),
    [
        (first(lambda handler: handler.send(b"later", 500), 2), 3, DATA),
        *(
            (first(lambda handler, when=when: handler.send(b"", 503, Retry_After=when)), 2, DATA)
            for when in ("soon", "Fri, 31 Dec 99999 23:59:59 GMT", "Fri, 31 Dec -1 23:59:59 GMT", "1e9")
        ),
        (cut(), 2, DATA),
        (lambda handler, number: ranged(handler, stop=TOTAL // 20), 20, DATA),
        (cut(lambda handler: handler.send(DATA)), 2, DATA),
        (cut(lambda handler: handler.send(DATA), ETag='W/"one"'), 2, DATA),
        (cut(lambda handler: ranged(handler, NEW, '"two"')), 2, NEW),
        (another_version, 3, NEW),
        (cut(lambda handler: handler.send(b"", 416, Content_Range="bytes */9")), 3, DATA),
        (part(f"bytes {HALF}-{END}/{TOTAL}", DATA[HALF:-9]), 3, DATA),
        (part(f"bytes {HALF}-{HALF + 99}/{TOTAL}", DATA[HALF : HALF + 100]), 3, DATA),
        (part(f"bytes {HALF}-{HALF + 99}/*", DATA[HALF : HALF + 100]), 3, DATA),
        (part(f"bytes {HALF}-{HALF + 99}/{HALF + 100}", DATA[HALF : HALF + 100]), 3, DATA),
        (part(f"bytes {HALF}-{END}/{TOTAL}", DATA[HALF:] + b"more"), 3, DATA),
        (part(f"bytes {HALF - 1}-{END}/{TOTAL}", DATA[HALF - 1 :]), 3, DATA),
        (part(f"bytes {HALF + 9}-{END}/{TOTAL}", DATA[HALF + 9 :]), 3, DATA),
        (part(f"bytes {HALF}-", DATA[HALF:]), 3, DATA),
        (part(f"bytes {HALF}-{END}/*", DATA[HALF:]), 2, DATA),
    ],
    ids=lambda value: value if isinstance(value, int) else type(value).__name__,
)
def test_whatever_a_server_does_the_file_is_whole(serve, tmp_path, answer, requests, data):
    site = serve(answer)
    get(site, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == data
    assert [*tmp_path.iterdir()] == [tmp_path / "f"]
    assert len(site.requests) == requests


def test_a_transfer_goes_on_where_it_was_cut_or_stalled(serve, tmp_path):
    def stall(handler: Handler) -> None:
        ranged(handler, stop=HALF)
        handler.wfile.flush()
        handler.server.site.over.wait()

    for name, begin in (("cut", partial(ranged, stop=HALF)), ("stalled", stall)):
        site = serve(first(begin))
        for _ in range(2):
            get(site, tmp_path / name, timeout=0.3, sha256=SHA256, size=TOTAL)
        assert (tmp_path / name).read_bytes() == DATA
        assert len(site.requests) == 2, "a file that is there is not fetched again"
        assert "range" not in site.requests[0]
        assert site.requests[0]["accept-encoding"] == "identity"
        assert (site.requests[1]["range"], site.requests[1]["if-range"]) == (f"bytes={HALF}-", '"one"')
    # A weak ETag does not say that the bytes are the same.
    site = serve(cut(ranged, ETag='W/"one"'))
    get(site, tmp_path / "weak")
    assert "range" not in site.requests[1]


def test_a_killed_job_goes_on_in_the_next(serve, tmp_path):
    def answer(handler: Handler, number: int) -> None:
        if 1 < number < ATTEMPTS + 3:
            handler.send(b"", 500)
        else:
            ranged(handler, stop=HALF if number == 1 else None)

    site = serve(answer)
    with refused("data.bin"):
        get(site, tmp_path / "f")
    assert not (tmp_path / "f").exists()
    get(site, tmp_path / "f", sha256=SHA256)
    assert site.requests[-1]["range"] == f"bytes={HALF}-"
    assert [*tmp_path.iterdir()] == [tmp_path / "f"]


def endless(handler: Handler, number: int, chunked: bool = False) -> None:
    """A file of 100 times the size: endless to all that look at no bound, and no full disk where one does not."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked") if chunked else None
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b"%x\r\n" % TOTAL * chunked + DATA + b"\r\n" * chunked)


def without_length(handler: Handler, number: int) -> None:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(DATA)


def answers(*data: Any, **headers: str) -> Answer:
    return lambda handler, number: handler.send(*data, **headers)


@pytest.mark.parametrize(
    ("answer", "options", "most"),
    [
        (answers(b"later", 503), {}, ATTEMPTS + 1),
        (answers(b"", 403), {}, 1),
        (answers(b"<html>Accept our terms</html>", Content_Type="text/html; charset=utf-8"), {}, 1),
        (answers(DATA, Content_Length=str(10**15)), {"size": 9}, 1),
        (lambda handler, number: ranged(handler), {"sha256": "0" * 64}, 1),
        (lambda handler, number: ranged(handler), {"size": 9}, 1),
        (endless, {"size": TOTAL}, 1),
        (partial(endless, chunked=True), {"size": TOTAL}, 1),
        (without_length, {}, 1),
        (lambda handler, number: ranged(handler, etag=f'"{number}"', stop=HALF - number % 3), {}, 3 * ATTEMPTS),
        *(
            (answers(b"", 302, Location=place), {}, 1)
            for place in ("file:///etc/passwd", "ftp://127.0.0.1/f", "http://127.0.0.1:99999/f")
        ),
        (answers(b"", 302, Location="/data.bin"), {}, 39),
    ],
)
def test_what_cannot_be_fetched_is_refused_and_nothing_of_it_kept(serve, tmp_path, answer, options, most):
    site = serve(answer)
    with refused("data.bin") as caught:
        get(site, tmp_path / "f", **options)
    assert len(site.requests) <= most
    assert not (tmp_path / "f").exists()
    if most == 1:
        assert [*tmp_path.iterdir()] == []
    if options:
        (tmp_path / "f").write_bytes(b"left by someone")
        with refused("data.bin"):
            get(site, tmp_path / "f", **options)
        assert [*tmp_path.iterdir()] == []
    if options == {"size": TOTAL}:
        assert int(re.findall(r"\d+", caught.value.cause)[0]) < 20 * TOTAL, "it is not read to its end"


@pytest.mark.parametrize("known", [{"size": TOTAL}, {"sha256": SHA256}])
def test_a_file_without_a_length_is_whole_by_what_the_config_says(serve, tmp_path, known):
    get(serve(without_length), tmp_path / "f", **known)
    assert (tmp_path / "f").read_bytes() == DATA


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/f", "http://127.0.0.1:port/f", "http://a..b/f"])
def test_an_address_that_cannot_be_is_not_tried_again(tmp_path, url):
    with refused(url):
        fetch(url, tmp_path / "f", backoff=1000)


def test_a_fetched_file_is_on_disk_before_it_has_its_name(serve, tmp_path, monkeypatch):
    site, synced, fsync = serve(lambda handler, number: ranged(handler)), [], os.fsync

    def noted(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, (tmp_path / "f").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    get(site, tmp_path / "f")
    assert synced == [((tmp_path / "f").stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_user_and_password_are_those_of_netrc_and_no_error_or_log_shows_any(
    serve, nobody, tmp_path, monkeypatch, caplog
):
    site = serve(lambda handler, number: ranged(handler))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    get(site, tmp_path / "f")
    assert site.requests[0]["authorization"] == f"Basic {base64.b64encode(b'me:hunter2').decode()}"
    caplog.set_level("INFO")
    for address in (nobody, serve(lambda handler, number: handler.send(b"", 404)).address):
        url = address.replace("http://", "http://me:hunter3@") + "/data.bin?signature=hunter2"
        with refused(f"{address}/data.bin") as caught:
            fetch(url, tmp_path / "g", backoff=0.001)
        assert "hunter" not in caplog.text + str(caught.value)
    assert len(caplog.messages) == ATTEMPTS


def lines(*texts: str) -> bytes:
    return "".join(f'{{"text": "{text}"}}\n' for text in texts).encode()


def test_a_source_of_addresses_is_read_in_parts_up_to_its_words(serve, tmp_path):
    site = serve(lambda handler, number: handler.send(lines(f"of {handler.path}")))
    urls = tuple(f"{site.address}/{name}.jsonl" for name in "abc")
    for part_of in range(2):
        download(Source(path=urls, parts=2), "d", tmp_path / "d" / f"{part_of}.parquet", part_of)
    texts = [pq.read_table(tmp_path / "d" / f"{part_of}.parquet")["text"].to_pylist() for part_of in range(2)]
    assert texts == [["of /a.jsonl", "of /c.jsonl"], ["of /b.jsonl"]]
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["0.parquet", "1.parquet"]
    site.requests.clear()
    assert download(Source(path=urls, words=3), "d", tmp_path / "d" / "0.parquet") == 2
    assert len(site.requests) == 2, "the last address is left alone"


def test_a_failed_source_keeps_what_it_fetched_but_for_a_damaged_file(serve, tmp_path):
    data = gzip.compress(lines("a", "b"))

    def answer(handler: Handler, number: int) -> None:
        handler.send(data[:-9] if number == 3 else data, 404 if number == 2 else 200)

    site, output = serve(answer), tmp_path / "d" / "0.parquet"
    source = Source(path=tuple(f"{site.address}/{name}.jsonl.gz" for name in "ab"), instructions="ask the owner")
    for requests in (2, 3):
        with refused("b.jsonl.gz") as caught:
            download(source, "d", output)
        assert caught.value.cure == "ask the owner" or requests == 3
        assert not output.exists()
        assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
        assert len(site.requests) == requests, "the first address is not fetched again"
    assert download(source, "d", output) == 4
    assert len(site.requests) == 4
    assert [*output.parent.iterdir()] == [output]


@pytest.mark.parametrize("url", ["ftp://host/a.jsonl", "file:///etc/passwd", "http://host/", "http://host/.."])
def test_an_address_that_names_no_file_is_refused(tmp_path, url):
    with refused(url):
        download(Source(path=url), "d", tmp_path / "d" / "0.parquet")


KEYS = """token access_token accessToken private_token api_key apikey apiKey key password sig Signature X-Amz-Signature
X-Amz-Credential X-Amz-Security-Token
AWSAccessKeyId Key-Pair-Id %74oken subscription-key auth jwt a=1&secret a=1;secret"""


def with_sources(**sources: Any) -> dict[str, Any]:
    """The tiny config with these sources in place of its own."""
    kinds = {name: "novel" if name == "fantasy" else "training" for name in sources}
    keys = {f"domains.{kinds[name]}.{name}.source": source for name, source in sources.items()}
    return changed(TINY, {"domains.novel.fortunes": None} | keys)


@pytest.mark.parametrize(
    ("address", "secret"),
    [
        ("https://hunter2@host/f.jsonl", True),
        ("https://me:hun%40ter2@host:8080/f.jsonl", True),
        *((f"https://host/f.jsonl?{key}=hunter2", True) for key in KEYS.split()),
        ("https://host/f.jsonl", False),
        ("https://host/@me/f.jsonl?version=2&sort_key=a&tokenizer=bpe&monkey=1#top", False),
        ("postgresql://me@host/demix", False),
        ("https://host/f.jsonl?token=", False),
        ("sqlite:///results/mlflow.db", False),
    ],
)
def test_credentials_in_addresses_are_known(address, secret):
    assert (secret_in(address) is not None) == secret


@pytest.mark.parametrize(
    "address",
    [
        *("https://me:hunter2@host/f.jsonl", "https://host/f?sig=hunter2", "https://host/f#access_token=hunter2"),
        *("https://me:hun/ter2@host/f", "https://[hunter2@host/f", "ftp://me:hunter2@host/f"),
    ],
)
def test_an_address_with_a_credential_is_refused_everywhere_and_not_shown(address, tmp_path):
    path = "domains.training.licenses.source.path"
    for use, subject in (
        (lambda: completed_run(with_sources(licenses={"path": address})), path),
        (lambda: completed_run(with_sources(licenses={"path": ["https://host/a", address]})), path),
        (lambda: completed_run(TINY | {"tracking": {"uri": address}}), "tracking.uri"),
        (lambda: completed_run(with_sources(licenses={"path": [address, 5]})), f"{path}.1"),
        (lambda: download(Source(path=address), "d", tmp_path / "0.parquet"), "an address in source.path"),
    ):
        with refused(subject) as caught:
            use()
        assert "ter2" not in str(caught.value)


def test_logs_show_no_credentials(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    said(["--version"])
    logging.getLogger("demix").error("see https://me:hunter2@host/f?X-Amz-Signature=hunter2&a=1, and what? a=1")
    assert capsys.readouterr().err == "see https://***@host/f?*** and what? a=1\n"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of two files, and of a hub whose data set owner/name has one branch."""
    files = {"a.jsonl": "a", "b.jsonl": "b", "api/datasets/owner/name/revision/main": {"id": "", "sha": COMMIT}}
    for name, content in files.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(json.dumps(content))
    with serving_folder(tmp_path / "site") as address:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.chdir(tmp_path)
        yield address


def digests(**contents: str) -> dict[str, Any]:
    made = {f"{name}.jsonl": hashlib.sha256(content.encode()).hexdigest() for name, content in contents.items()}
    return {"source": {"sha256": made}}


def test_what_pin_prints_pins_every_source(hub):
    for name in ("fortunes", "licenses"):
        Path(f"{name}.jsonl").write_text(name)
    config = with_sources(
        parliament={"path": [f"{hub}/a.jsonl", f"{hub}/b.jsonl"]},
        scripture=HUB,
        licenses={"path": "*.jsonl"},
        fantasy={"path": "licenses.jsonl"},
    )
    Path("config.yaml").write_text(yaml.safe_dump(config))
    printed = demix("config", "--pin", "config.yaml").stdout
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
    assert demix("config", "--pin", "pinned.yaml").stdout == ""
    assert not [path for path in Path("results").rglob("*") if path.is_file()]


def test_pin_names_what_it_cannot_read_beside_the_rest(hub, caplog):
    config = with_sources(
        parliament={"path": f"{hub}/none.jsonl"},
        scripture=HUB,
        licenses={"path": "none.jsonl", "instructions": "ask its owner"},
        fantasy=HUB | {"path": "owner/none"},
    )
    Path("config.yaml").write_text(yaml.safe_dump(config))
    with caplog.at_level(logging.ERROR):
        done = demix("config", "--pin", "config.yaml")
    assert done.exit_code == 1
    assert yaml.safe_load(done.stdout)["domains"] == {"training": {"scripture": {"source": {"revision": COMMIT}}}}
    for named in ("parliament", "licenses", "ask its owner", "fantasy", "owner/none"):
        assert named in caplog.text


@pytest.mark.parametrize("kind", ["hub", "url"])
def test_without_a_network_pin_ends_at_once(kind, nobody, tmp_path, monkeypatch):
    """Before each source tries by itself, for minutes."""
    monkeypatch.setenv("HF_ENDPOINT", nobody)
    monkeypatch.chdir(tmp_path)
    url = {"path": f"{nobody}/a.jsonl"}
    one, other = (HUB, url) if kind == "hub" else (url, HUB)
    Path("config.yaml").write_text(yaml.safe_dump(with_sources(parliament=one, scripture=other, fantasy=other)))
    refusal("config", "--pin", "config.yaml", of=nobody if kind == "hub" else url["path"])
    assert not [path for path in Path("results").rglob("*") if path.is_file()]


@pytest.mark.parametrize("revision", ["main", "refs/convert/parquet", COMMIT[:7], COMMIT.upper()])
def test_a_revision_that_can_move_must_be_allowed(revision):
    config = with_sources(fantasy=HUB | {"revision": revision})
    with refused("domains.novel.fantasy.source.revision"):
        completed_run(config)
    assert completed_run(config | {"allow_branches": True}).config.allow_branches
    completed_run(with_sources(fantasy=HUB | {"revision": COMMIT}))
