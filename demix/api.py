"""What a program may build on: a model, and a run, from Python (`demix.load`, `demix.open_run`).

The names that `demix` lists, and their attributes without a leading underscore, change as semantic versioning has it:
all else in demix is internal. A text is a string, or a `Path` for a file. It is a text of its own after
`<|endoftext|>`, and one that is longer than the model's context is cut into consecutive blocks, as in scoring
(docs/explanation/demix-layers.md). Axes: N tokens of a text, E experts, V types. Numbers are those of the command that
a method names. Bad input raises `DemixError`, whose text is one line.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from demix.errors import DemixError
from demix.evaluate.own_summary import answer
from demix.evaluate.own_text import NO_TEXT, Judge, OwnText, whole_text
from demix.model.continuations import MixedModel, mixture_of, text_scores
from demix.model.decode import continuation, decoded, open_model, refuse_outside
from demix.model.device import device_named
from demix.model.directory import tokenizer_of
from demix.model.gpt import GPT
from demix.model.scoring import columns_of
from demix.progress import progress

if TYPE_CHECKING:
    import pandas as pd

    from demix.data.tokenizer import Tokenizer
    from demix.query.views import QueryRun

Text = str | Path


def load(
    model: str | Path,
    experts: Sequence[str] | None = None,
    device: str | None = "cpu",
    tokenizer: str | Path | None = None,
) -> "OpenedModel":
    """Open the model in the folder `model`, such as results/<run>/models/<model>, with `experts` (by default all).

    `device` is `cpu`, where the commands compute, `cuda`, `cuda:<number>`, or None for the GPU where there is one.
    `tokenizer` is a tokenizer.json; by default that of the model's folder or its run. Raises DemixError for a folder
    without a model, an unknown expert, and a model that mixes no experts (masked, or with domain tokens).
    """
    directory, place = Path(model), None if tokenizer is None else Path(tokenizer)
    where = device_named(device)
    path, _ = tokenizer_of(directory, place)
    trunks, encoder = open_model(directory, _names(experts), path, where)
    return OpenedModel(directory, columns_of(trunks), encoder, path, trunks, where)


def open_run(run: str | Path) -> "OpenedRun":
    """Open the run in the folder `run`, results/<run>, finished or under way. Raises DemixError for no such run."""
    from demix.query.ask import named_runs

    (found,) = named_runs([Path(run)])
    return OpenedRun(found.folder, found)


@dataclass(frozen=True, eq=False)
class TokenScores:
    """The N tokens of a text under E experts and their mixture, in nats.

    `tokens` are their texts; a character comes with the token that holds its last UTF-8 byte. `ids` [N] int64 are
    their numbers. `log_probabilities` [N, E] are log p of each token under each of `experts`, `weights` [N, E] the
    experts' weights that predicted the token (each row adds up to 1), and `mixture` [N] log p under the mixture, all
    float64. All follow from the tokens before.
    """

    experts: tuple[str, ...]
    tokens: tuple[str, ...]
    ids: np.ndarray
    log_probabilities: np.ndarray
    weights: np.ndarray
    mixture: np.ndarray

    @property
    def text(self) -> str:
        """The text of the tokens."""
        return "".join(self.tokens)

    @property
    def table(self) -> "pd.DataFrame":
        """A row for each token: the token, log p under the mixture, and under each expert log p and its weight."""
        import pandas as pd

        by_expert = {"log p": self.log_probabilities, "weight": self.weights}
        columns = {("", "token"): self.tokens, ("", "mixture"): self.mixture}
        for kind, values in by_expert.items():
            columns |= {(kind, name): values[:, number] for number, name in enumerate(self.experts)}
        return pd.DataFrame(columns)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return _shown(self.table)


@dataclass(frozen=True, eq=False)
class NextToken:
    """What may follow a text.

    `log_probabilities` [V] float64 are log p in nats of every type of the tokenizer under the mixture; `weights` [E]
    are those of `experts` (they add up to 1); `types` [V] are the texts of the types, bytes that are not UTF-8 as
    U+FFFD.
    """

    experts: tuple[str, ...]
    weights: np.ndarray
    log_probabilities: np.ndarray
    types: tuple[str, ...] = field(repr=False)

    def likeliest(self, count: int = 10) -> "pd.DataFrame":
        """The `count` likeliest tokens, the likeliest first: token, id and probability."""
        import pandas as pd

        ids = np.argsort(-self.log_probabilities, kind="stable")[:count]
        chosen, shares = [self.types[number] for number in ids], np.exp(self.log_probabilities[ids])
        return pd.DataFrame({"token": chosen, "id": ids, "probability": shares})

    def _repr_html_(self) -> str:
        return _shown(self.likeliest())


@dataclass(frozen=True)
class TextFigures(OwnText):
    """What `demix eval` prints of a text, with the fields of its `--json`; `print` shows it as the command does.

    A perplexity is per token, `bits_per_byte` per byte of UTF-8, `behind` in nats per token; see
    `demix.evaluate.own_text.ExpertLine` and docs/how-to/eval-and-generate.md.
    """

    @property
    def table(self) -> "pd.DataFrame":
        """The mixtures, then the experts, the best first, by name: their figures, NaN where a line has none."""
        import pandas as pd

        rows = [{"of": "mixture", **vars(line)} for line in self.mixtures]
        for line in self.ranked:
            usual = line.usual and line.usual.perplexity
            rows.append({"of": "expert", **vars(line), "usual": float("nan") if usual is None else usual})
        return pd.DataFrame(rows).set_index(["of", "name"])

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=150, markup=False, emoji=False, color_system=None)
        for part in answer(self):
            console.print(part)
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    def _repr_html_(self) -> str:
        return _shown(self.table)


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A model with the `experts` that its mixtures are made of, from `demix.load`.

    `experts`, in the methods, are those to mix, by default all; the others have the weight 0. `weights` is the rule for
    the weights and `prior` the prior, named as in `demix generate`. Rules: `tempered` with the parameters that were
    chosen for the model, `switching`, `history`, `released`, `cluster`, `cluster+history`, `average`. Priors:
    `uniform`, `updating`, weights (`law=2,news=1`), or a domain of the run.
    """

    folder: Path
    experts: tuple[str, ...]
    tokenizer: "Tokenizer" = field(repr=False)
    _tokenizer_file: Path = field(repr=False)
    _trunks: list[GPT] = field(repr=False)
    _device: torch.device = field(repr=False)

    def score(
        self,
        texts: Text | Sequence[Text],
        *,
        experts: Sequence[str] | None = None,
        weights: str = "tempered",
        prior: str = "",
    ) -> list[TokenScores]:
        """The tokens of each text, or of the only one, under every expert and the mixture. Texts are scored together.

        The log p of a text add up to that of `demix lm-eval` for whole texts. Raises DemixError for an empty text.
        """
        mixture = self._mixture(experts, weights, prior)
        given = [texts] if isinstance(texts, str | Path) else list(texts)
        ids = [self.tokenizer.encode(whole_text(text)).tolist() for text in given]
        if [] in ids:
            raise DemixError(f"text {ids.index([]) + 1}", NO_TEXT[0], "remove it from the list")
        found = {}
        with progress("tokens", sum(map(len, ids)) * len(self._trunks)) as advance:
            for number, scores, log_p, log_g in text_scores(mixture, ids, self.tokenizer.end_of_text, advance):
                pieces = decoded(self.tokenizer, ids[number])
                parts = scores.T.numpy(), log_g.exp().numpy(), log_p.numpy()
                found[number] = TokenScores(self.experts, tuple(pieces), np.array(ids[number]), *parts)
        return [found[number] for number in range(len(ids))]

    def next(
        self,
        text: Text,
        *,
        experts: Sequence[str] | None = None,
        weights: str = "tempered",
        prior: str = "",
    ) -> NextToken:
        """What may follow a text, which may be empty: the distribution that `demix generate` samples from."""
        decoder = self._mixture(experts, weights, prior).after(self.tokenizer, whole_text(text))
        types = tuple(piece.decode(errors="replace") for piece in self.tokenizer.vocabulary.pieces)
        log_p = decoder.next_log_probabilities()[0].double().cpu().numpy()
        return NextToken(self.experts, np.exp(decoder.posterior.log_weights[0]), log_p, types)

    def generate(
        self,
        text: Text,
        *,
        tokens: int = 100,
        experts: Sequence[str] | None = None,
        weights: str = "tempered",
        prior: str = "",
        temperature: float = 0.8,
        top_p: float = 0.95,
        seed: int = 1,
    ) -> TokenScores:
        """Continue a text by at most `tokens` tokens, as `demix generate`: `str` of the answer is the continuation.

        `temperature` 0 chooses the likeliest token; sampling is from the likeliest tokens that together have the
        probability `top_p`. The log-probabilities are those of the experts and the mixture, before temperature and
        `top_p`.
        """
        refuse_outside(
            tokens=(tokens, 1, 2**31), temperature=(temperature, 0, 100), top_p=(top_p, 0.001, 1), seed=(seed, 0, 2**62)
        )
        decoder = self._mixture(experts, weights, prior).after(self.tokenizer, whole_text(text))
        drawn = [*continuation(decoder, self.tokenizer, tokens, temperature, top_p, seed)]
        ids, log_p = np.array([one.token for one in drawn], np.int64), np.zeros((len(drawn), len(self.experts)))
        log_g = log_p.copy()
        for number, one in enumerate(drawn):
            log_p[number], log_g[number] = one.scores[:, 0, 0], one.log_weights[0, 0]
        pieces = tuple(one.piece for one in drawn)
        return TokenScores(self.experts, pieces, ids, log_p, np.exp(log_g), np.logaddexp.reduce(log_g + log_p, axis=-1))

    def eval(self, text: Text, *, field: str = "text") -> TextFigures:
        """What `demix eval` prints of a text, or of a file of documents in any format that the command reads.

        `field` holds the text in a file of records. As in training and scoring, and unlike in `score`, each document
        begins with an `<|endoftext|>` that is a token of the text.
        """
        return TextFigures(**vars(self._judge.result(text, self._judge.read(text, field))))

    @cached_property
    def _judge(self) -> Judge:
        return Judge(self.folder, self._trunks, self._tokenizer_file, self._device)

    def _mixture(self, experts: Sequence[str] | None, weights: str, prior: str) -> MixedModel:
        return mixture_of(self.folder, self._trunks, self.tokenizer, weights, prior, _names(experts))


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """A run, from `demix.open_run`. Files are read when they are asked for."""

    folder: Path
    _run: "QueryRun" = field(repr=False)

    @property
    def results(self) -> "pd.DataFrame":
        """The rows of results.parquet (docs/reference/files-results.md), checked as for the report."""
        from demix.report.read import read_results

        return read_results(self.folder / "results.parquet").rows

    def sql(self, query: str) -> "pd.DataFrame":
        """The rows that one SELECT finds, as `demix sql` does (docs/reference/sql-views.md lists the tables)."""
        from demix.query.ask import Answers
        from demix.query.output import distinct

        with Answers([self._run]) as answers, answers.ask(query) as reader:
            table = reader.read_all()
        return table.rename_columns(distinct(table.column_names)).to_pandas()


def _names(experts: Sequence[str] | None) -> list[str] | None:
    """Names of experts. A string, whose characters would be names, is refused."""
    if isinstance(experts, str):
        raise DemixError("experts", "is a string", f'give a list of names: ["{experts}"]')
    return None if experts is None else [*experts]


def _shown(table: "pd.DataFrame") -> str:
    """A table for a notebook."""
    text: str = table.to_html(na_rep="", float_format="{:.3f}".format)
    return text
