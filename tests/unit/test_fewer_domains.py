"""Domains that a config leaves out of those of its base."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from demix.errors import DemixError
from demix.run.check import completed_run, load_run
from support.configs import TEXT, domains, small

REPOSITORY = Path(__file__).parents[2]


def test_null_leaves_out_a_domain_of_the_base(tmp_path: Path) -> None:
    left_out = {"training": {"scripture": None, "politics": None}, "novel": {"wiki": None, "politics": TEXT}}
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump({"base": str(REPOSITORY / "config" / "sample.yaml"), "domains": left_out}))
    run, sample = load_run(mine), load_run(REPOSITORY / "config" / "sample.yaml")
    assert run.training == tuple(name for name in sample.training if name not in left_out["training"])
    assert run.novel == (*(name for name in sample.novel if name != "wiki"), "politics"), "moved to the novel domains"
    assert run.rows["demix"].learned == run.training
    assert completed_run(run.config.values).config.values == run.config.values


LEFT = domains(("law", "code", "wiki"), ("songs",))
LEFT["training"] |= {"news": None}
REMOVAL = {"retrain_without": ["law"], "replacement": "songs"}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"removal": {"retrain_without": ["news"], "replacement": "songs"}}, r"removal\.retrain_without: news is no"),
        ({"training": {"ranks": 4, "replicas": {"news": 2}}}, r"key training\.replicas\.news: is no training domain"),
        ({"tasks": {"t": {"made": "domains", "labels": {"news": "n"}}}}, r"tasks\.t\.labels\.news: is no training"),
        ({"domains": {"training": {"law": None}}}, r"key domains\.training: leaves out every domain; keep one"),
        ({"domains": {"training": {"law": 3}}}, r"key domains\.training\.law: is 3; allowed is object or null"),
        (
            {"domains": LEFT | {"novel": {"songs": None}}, "removal": REMOVAL},
            r"key removal\.replacement: is 'songs', which is no novel domain",
        ),
    ],
)  # fmt: skip
def test_a_key_that_names_a_domain_that_is_left_out_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(DemixError, match=message):
        completed_run(small(**{"domains": LEFT} | sections))
