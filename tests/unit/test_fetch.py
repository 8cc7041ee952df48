"""Fetching from a real server on loopback that fails in every way that servers do."""

import base64
import gzip
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from demix.data import sources
from demix.data.fetch import ATTEMPTS, fetch
from demix.data.sources import Source, download
from demix.errors import DemixError
from support.server import Answer, Handler, Site, serving

DATA = bytes(hashlib.sha256(b"demix").digest()) * 20_000
HALF = len(DATA) // 2
SHA256 = hashlib.sha256(DATA).hexdigest()


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


def test_a_file_is_fetched_whole_and_only_once(serve, tmp_path):
    site = serve(lambda handler, number: ranged(handler))
    for _ in range(2):
        get(site, tmp_path / "f", size=len(DATA), sha256=SHA256)
    assert (tmp_path / "f").read_bytes() == DATA
    assert [*tmp_path.iterdir()] == [tmp_path / "f"]
    assert len(site.requests) == 1
    assert site.requests[0]["accept-encoding"] == "identity"


def test_500_twice_then_the_file(serve, tmp_path):
    site = serve(lambda handler, number: handler.send(b"later", 500) if number < 3 else ranged(handler))
    get(site, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    assert len(site.requests) == 3


def test_500_for_ever_ends_in_one_line(serve, tmp_path):
    site = serve(lambda handler, number: handler.send(b"later", 503))
    with pytest.raises(DemixError, match=r"data\.bin: cannot be fetched \(it answers 503\); rerun to go on") as caught:
        get(site, tmp_path / "f")
    assert "\n" not in str(caught.value)
    assert len(site.requests) == ATTEMPTS + 1
    assert [*tmp_path.iterdir()] == []


def test_what_is_refused_is_not_tried_again(serve, tmp_path):
    site = serve(lambda handler, number: handler.send(b"", 403))
    with pytest.raises(DemixError, match="answers 403 Forbidden; check the address, and whether terms"):
        get(site, tmp_path / "f")
    assert len(site.requests) == 1


def test_a_cut_transfer_goes_on_where_it_ended(serve, tmp_path):
    site = serve(lambda handler, number: ranged(handler, stop=HALF if number == 1 else None))
    get(site, tmp_path / "f", sha256=SHA256)
    assert (tmp_path / "f").read_bytes() == DATA
    assert site.requests[1]["range"] == f"bytes={HALF}-"
    assert site.requests[1]["if-range"] == '"one"'


def test_many_cuts_are_no_failure_while_bytes_come(serve, tmp_path):
    site = serve(lambda handler, number: ranged(handler, stop=len(DATA) // 20))
    get(site, tmp_path / "f", sha256=SHA256)
    assert len(site.requests) > 2 * ATTEMPTS


def test_a_stalled_transfer_goes_on(serve, tmp_path):
    def answer(handler: Handler, number: int) -> None:
        ranged(handler, stop=HALF if number == 1 else None)
        if number == 1:
            handler.wfile.flush()
            handler.server.site.over.wait()

    site = serve(answer)
    get(site, tmp_path / "f", timeout=0.3, sha256=SHA256)
    assert site.requests[1]["range"] == f"bytes={HALF}-"


def test_a_killed_job_goes_on_in_the_next(serve, tmp_path):
    site = serve(lambda handler, number: ranged(handler) if number > ATTEMPTS + 2 else ranged(handler, stop=HALF)
                 if number == 1 else handler.send(b"", 500))  # fmt: skip
    with pytest.raises(DemixError):
        get(site, tmp_path / "f")
    assert not (tmp_path / "f").exists()
    get(site, tmp_path / "f", sha256=SHA256)
    assert site.requests[-1]["range"] == f"bytes={HALF}-"
    assert [*tmp_path.iterdir()] == [tmp_path / "f"]


def test_ranges_ignored_starts_over(serve, tmp_path):
    site = serve(lambda handler, number: handler.send(DATA, stop=HALF if number == 1 else None))
    get(site, tmp_path / "f", sha256=SHA256)
    assert "range" in site.requests[1]


@pytest.mark.parametrize("honest", [True, False])
def test_an_etag_that_changes_midway_starts_over(serve, tmp_path, honest):
    new = DATA[::-1]

    def answer(handler: Handler, number: int) -> None:
        if number == 1:
            ranged(handler, stop=HALF)
        elif honest or "Range" not in handler.headers:
            ranged(handler, new, '"two"')
        else:
            # Gives the range although If-Range names a version that is gone.
            handler.send(new[HALF:], 206, ETag='"two"', Content_Range=f"bytes {HALF}-{len(new) - 1}/{len(new)}")

    site = serve(answer)
    get(site, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == new
    assert len(site.requests) == (2 if honest else 3)


def gives(span: str, data: bytes) -> Answer:
    """The first answer is cut in half, the next one is `data` as the range `span`, and all others are good."""

    def answer(handler: Handler, number: int) -> None:
        if number == 2:
            handler.send(data, 206, Content_Range=span)
        else:
            ranged(handler, stop=HALF if number == 1 else None)

    return answer


@pytest.mark.parametrize(
    ("span", "data"),
    [
        (f"bytes {HALF}-{len(DATA) - 1}/{len(DATA)}", DATA[HALF:-9]),
        (f"bytes {HALF}-{HALF + 99}/{len(DATA)}", DATA[HALF : HALF + 100]),
        (f"bytes {HALF}-{HALF + 99}/*", DATA[HALF : HALF + 100]),
        (f"bytes {HALF}-{HALF + 99}/{HALF + 100}", DATA[HALF : HALF + 100]),
        (f"bytes {HALF}-{len(DATA) - 1}/{len(DATA)}", DATA[HALF:] + b"more"),
        (f"bytes {HALF - 1}-{len(DATA) - 1}/{len(DATA)}", DATA[HALF - 1 :]),
        (f"bytes {HALF + 9}-{len(DATA) - 1}/{len(DATA)}", DATA[HALF + 9 :]),
        (f"bytes {HALF}-", DATA[HALF:]),
    ],
    ids=["short body", "short range", "no total", "other total", "long body", "early", "late", "no range"],
)
def test_a_range_that_does_not_complete_the_file_is_not_taken_for_its_end(serve, tmp_path, span, data):
    site = serve(gives(span, data))
    get(site, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    assert len(site.requests) > 2


def test_a_range_of_unknown_total_is_the_end_at_the_first_answers_length(serve, tmp_path):
    site = serve(gives(f"bytes {HALF}-{len(DATA) - 1}/*", DATA[HALF:]))
    get(site, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA
    assert len(site.requests) == 2


def test_a_file_that_changes_at_each_cut_is_not_asked_for_ever(serve, tmp_path):
    site = serve(lambda handler, number: ranged(handler, DATA, f'"{number}"', stop=HALF - number % 3))
    with pytest.raises(DemixError, match="cannot be fetched"):
        get(site, tmp_path / "f")
    assert len(site.requests) <= 3 * ATTEMPTS


@pytest.mark.parametrize("chunked", [False, True])
def test_an_endless_file_ends_at_the_bytes_that_the_config_names(serve, tmp_path, chunked):
    def answer(handler: Handler, number: int) -> None:
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked") if chunked else None
        handler.end_headers()
        # 100 times what is asked for: endless to all that look at no bound, and no full disk where one does not.
        for _ in range(100):
            handler.wfile.write(b"%x\r\n" % len(DATA) * chunked + DATA + b"\r\n" * chunked)

    with pytest.raises(DemixError, match=rf"has \d+ bytes, not {len(DATA)}") as caught:
        get(serve(answer), tmp_path / "f", size=len(DATA))
    assert int(str(caught.value).partition("has ")[2].partition(" ")[0]) < 4 * len(DATA)
    assert [*tmp_path.iterdir()] == []


def test_a_length_other_than_the_configs_is_refused_before_it_is_fetched(serve, tmp_path):
    site = serve(lambda handler, number: handler.send(DATA, Content_Length=str(10**15)))
    with pytest.raises(DemixError, match=f"has {10**15} bytes, not 9"):
        get(site, tmp_path / "f", size=9)
    assert len(site.requests) == 1
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("known", [{}, {"size": len(DATA)}, {"sha256": SHA256}])
def test_a_file_whose_end_nothing_tells_is_refused(serve, tmp_path, known):
    def answer(handler: Handler, number: int) -> None:
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(DATA)

    site = serve(answer)
    if known:
        get(site, tmp_path / "f", **known)
        assert (tmp_path / "f").read_bytes() == DATA
        return
    with pytest.raises(DemixError, match=r"is sent without its length.*; give source\.bytes or source\.sha256"):
        get(site, tmp_path / "f")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("when", ["soon", "Fri, 31 Dec 99999 23:59:59 GMT", "Fri, 31 Dec -1 23:59:59 GMT", "1e9"])
def test_a_time_to_wait_that_cannot_be_read_is_not_waited_for(serve, tmp_path, when):
    site = serve(lambda handler, number: handler.send(b"", 503, Retry_After=when) if number == 1 else ranged(handler))
    get(site, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == DATA


def test_a_weak_etag_is_not_trusted_for_ranges(serve, tmp_path):
    site = serve(lambda handler, number: handler.send(DATA, stop=HALF if number == 1 else None, ETag='W/"one"'))
    get(site, tmp_path / "f", sha256=SHA256)
    assert "range" not in site.requests[1]


def test_a_range_past_a_shrunken_file_starts_over(serve, tmp_path):
    def answer(handler: Handler, number: int) -> None:
        if "Range" in handler.headers:
            handler.send(b"", 416, Content_Range="bytes */9")
        else:
            handler.send(DATA if number == 1 else b"shrunken!", stop=HALF if number == 1 else None)

    site = serve(answer)
    get(site, tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"shrunken!"


@pytest.mark.parametrize("wrong", [{"sha256": "0" * 64}, {"size": 9}])
def test_wrong_bytes_are_not_kept(serve, tmp_path, wrong):
    site = serve(lambda handler, number: ranged(handler))
    with pytest.raises(DemixError, match=r"data\.bin: has .*, not (0000|9)"):
        get(site, tmp_path / "f", **wrong)
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "f").write_bytes(b"left by someone")
    with pytest.raises(DemixError, match=r"data\.bin: has"):
        get(site, tmp_path / "f", **wrong)
    assert [*tmp_path.iterdir()] == []


def test_secrets_in_addresses_are_not_shown(serve, tmp_path):
    site = serve(lambda handler, number: handler.send(b"", 404))
    url = site.address.replace("http://", "http://me:hunter2@") + "/data.bin?signature=hunter3"
    with pytest.raises(DemixError) as caught:
        fetch(url, tmp_path / "f")
    assert "hunter" not in str(caught.value)


def _lines(*texts: str) -> bytes:
    return "".join(f'{{"text": "{text}"}}\n' for text in texts).encode()


def test_a_source_of_addresses_is_read_in_parts(serve, tmp_path):
    import pyarrow.parquet as pq

    site = serve(lambda handler, number: handler.send(_lines(handler.path)))
    urls = tuple(f"{site.address}/{name}.jsonl" for name in "abc")
    source = Source("url", urls, parts=2)
    for part in range(2):
        download(source, "d", tmp_path / "d" / f"{part}.parquet", part)
    texts = [pq.read_table(tmp_path / "d" / f"{part}.parquet")["text"].to_pylist() for part in range(2)]
    assert texts == [["/a.jsonl", "/c.jsonl"], ["/b.jsonl"]]
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == ["0.parquet", "1.parquet"]


def test_a_word_budget_leaves_later_addresses_alone(serve, tmp_path):
    site = serve(lambda handler, number: handler.send(_lines("four words in it") * 5))
    urls = tuple(f"{site.address}/{name}.jsonl" for name in "abc")
    assert download(Source("url", urls, words=9), "d", tmp_path / "d" / "0.parquet") == 3
    assert len(site.requests) == 1


def test_a_failed_source_keeps_what_it_fetched_and_names_what_to_do(serve, tmp_path):
    site = serve(lambda handler, number: handler.send(_lines("a"), 404 if number == 2 else 200))
    urls = tuple(f"{site.address}/{name}.jsonl" for name in "ab")
    source = Source("url", urls, instructions="accept the terms at example.org")
    output = tmp_path / "d" / "0.parquet"
    with pytest.raises(DemixError, match=r"answers 404 Not Found; accept the terms at example\.org"):
        download(source, "d", output)
    assert not output.exists()
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700
    assert download(source, "d", output) == 2
    assert len(site.requests) == 3, "the first address was not fetched again"
    assert [*output.parent.iterdir()] == [output]


def test_a_damaged_file_is_fetched_again_by_the_next_run(serve, tmp_path):
    data = gzip.compress(_lines("a", "b"))
    site = serve(lambda handler, number: handler.send(data[:-9] if number == 1 else data))
    source = Source("url", f"{site.address}/data.jsonl.gz")
    output = tmp_path / "d" / "0.parquet"
    with pytest.raises(DemixError, match="damaged or cut short"):
        download(source, "d", output)
    assert download(source, "d", output) == 2
    assert [*output.parent.iterdir()] == [output]


def test_a_page_that_asks_for_consent_is_no_file(serve, tmp_path):
    page = b"<html>Accept our terms</html>"
    site = serve(lambda handler, number: handler.send(page, Content_Type="text/html; charset=utf-8"))
    with pytest.raises(DemixError, match=r"data\.bin: gives a web page, not a file; open it in a browser"):
        get(site, tmp_path / "f")
    assert [*tmp_path.iterdir()] == []


def test_addresses_that_name_no_file(tmp_path):
    for url in ("ftp://host/a.jsonl", "file:///etc/passwd", "http://host/", "http://host/.."):
        with pytest.raises(DemixError, match="is no address of a file"):
            download(Source("url", url), "d", tmp_path / "d" / "0.parquet")
    assert sources.KINDS.keys() == {"files", "url", "store", "hub"}


@pytest.mark.parametrize("place", ["file:///etc/passwd", "ftp://127.0.0.1/f", "http://127.0.0.1:99999/f", "/data.bin"])
def test_where_an_answer_leads_is_not_tried_again(serve, tmp_path, place):
    site = serve(lambda handler, number: handler.send(b"", 302, Location=place, Connection="close"))
    with pytest.raises(DemixError, match=r"data\.bin: cannot be fetched \(.*\); correct the address"):
        get(site, tmp_path / "f")
    assert len(site.requests) < (40 if place == "/data.bin" else 2)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/f", "http://127.0.0.1:port/f", "http://a..b/f"])
def test_an_address_that_cannot_be_is_not_tried_again(tmp_path, url):
    with pytest.raises(DemixError, match=r"cannot be fetched.*; correct the address"):
        fetch(url, tmp_path / "f", backoff=1000)


def test_a_fetched_file_is_on_disk_before_it_has_its_name(serve, tmp_path, monkeypatch):
    site, synced, fsync = serve(lambda handler, number: ranged(handler)), [], os.fsync

    def noted(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, (tmp_path / "f").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    get(site, tmp_path / "f")
    assert synced == [((tmp_path / "f").stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_user_and_password_are_those_of_netrc(serve, tmp_path, monkeypatch):
    site = serve(lambda handler, number: ranged(handler))
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    get(site, tmp_path / "f")
    assert site.requests[0]["authorization"] == f"Basic {base64.b64encode(b'me:hunter2').decode()}"


def test_where_nobody_listens_no_query_and_no_password_is_shown(tmp_path, caplog):
    caplog.set_level("INFO")
    with pytest.raises(DemixError, match="cannot be fetched") as caught:
        fetch("http://me:hunter3@127.0.0.1:9/f?signature=hunter2", tmp_path / "f", backoff=0.001)
    assert "hunter" not in caplog.text + str(caught.value)
    assert "trying again" in caplog.text
