"""No credential that stands in an address gets into a run, a log or an error."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from demix.commands.main import _StandardError
from demix.config.addresses import secret_in
from demix.data.sources import Source, download
from demix.errors import DemixError
from demix.run.check import completed_run

CONFIG = yaml.safe_load((Path(__file__).parents[1] / "workflow" / "tiny.yaml").read_text())
SECRET = [
    "https://me:hunter2@host/f.jsonl", "https://hunter2@host/f.jsonl", "https://me:hun%40ter2@host:8080/f.jsonl",
    *(f"https://host/f.jsonl?{key}=hunter2" for key in (
        "token", "access_token", "accessToken", "private_token", "api_key", "apikey", "apiKey", "key", "password",
        "sig", "Signature", "X-Amz-Signature", "X-Amz-Credential", "X-Amz-Security-Token", "AWSAccessKeyId",
        "Key-Pair-Id", "%74oken", "subscription-key", "auth", "jwt", "a=1&secret", "a=1;secret",
    )),
    "https://host/f.jsonl#access_token=hunter2",
]  # fmt: skip


def with_path(path: Any) -> dict[str, Any]:
    config = copy.deepcopy(CONFIG)
    config["domains"]["training"]["licenses"]["source"] = {"kind": "url", "path": path}
    return config


@pytest.mark.parametrize("address", SECRET)
def test_an_address_with_a_credential_is_refused_everywhere(address: str, tmp_path: Path) -> None:
    tracked = copy.deepcopy(CONFIG) | {"tracking": {"uri": address}}
    for refused in (
        lambda: completed_run(with_path(address)),
        lambda: completed_run(with_path(["https://host/a.jsonl", address])),
        lambda: completed_run(tracked),
        lambda: download(Source("url", address), "d", tmp_path / "0.parquet"),
    ):
        with pytest.raises(DemixError, match="which logs and records would show; leave it out") as caught:
            refused()
        assert "ter2" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        "https://host/f.jsonl", "https://host/@me/f.jsonl?version=2&sort_key=a&tokenizer=bpe&monkey=1#top",
        "postgresql://me@host/demix", "https://host/f.jsonl?token=", "sqlite:///results/mlflow.db",
    ],
)  # fmt: skip
def test_other_addresses_are_accepted(address: str) -> None:
    assert secret_in(address) is None


@pytest.mark.parametrize(
    "path",
    ["https://me:hun/ter2@host/f", "https://[hunter2@host/f", "ftp://me:hunter2@host/f", ["https://me:hunter2@h/f", 5]],
)
def test_no_wrong_address_is_shown_with_its_credential(path: Any) -> None:
    with pytest.raises(DemixError) as caught:
        completed_run(with_path(path))
    assert "ter2" not in str(caught.value)


def test_logs_show_no_credentials(capsys: pytest.CaptureFixture[str]) -> None:
    text = "see https://me:hunter2@host/f?X-Amz-Signature=hunter2&a=1, and what? a=1"
    record = logging.LogRecord("demix", logging.INFO, "", 1, "%s", (text,), None)
    _StandardError().emit(record)
    assert capsys.readouterr().err == "see https://***@host/f?*** and what? a=1\n"
