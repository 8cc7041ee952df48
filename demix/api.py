"""The public Python API: a model (`demix.load`) and a run (`demix.open_run`).

The names that `demix` lists, and their attributes without a leading underscore, follow semantic versioning. Everything
else in demix is internal. A text is a string, or a `Path` for a file. Each text is preceded by `<|endoftext|>`; a text
that is longer than the model's context is cut into consecutive blocks, as in scoring
(docs/explanation/demix-layers.md). Axes: N tokens of a text, E experts, V vocabulary entries. Methods return the same
numbers as the command that their description names. Bad input raises `DemixError`, whose text is one line.
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
    """Open the model in the folder `model`, such as results/<run>/models/<model>, with `experts` (default: all).

    `device` is `cpu` (as in `demix eval` and `demix generate`), `cuda`, `cuda:<number>`, or None for a GPU if there is
    one. `tokenizer` is a tokenizer.json; by default the one in the model's folder or its run. Raises DemixError for a
    folder without a model, an unknown expert, and a model whose experts cannot be mixed (masked, or with domain
    tokens).
    """
    directory, place = Path(model), None if tokenizer is None else Path(tokenizer)
    where = device_named(device)
    path, _ = tokenizer_of(directory, place)
    trunks, encoder = open_model(directory, _names(experts), path, where)
    return OpenedModel(directory, columns_of(trunks), encoder, path, trunks, where)


def open_run(run: str | Path) -> "OpenedRun":
    """Open the run in the folder `run`, results/<run>; it need not be finished.

    Raises DemixError if the folder holds no run.
    """
    from demix.query.ask import named_runs

    (found,) = named_runs([Path(run)])
    return OpenedRun(found.folder, found)


@dataclass(frozen=True, eq=False)
class TokenScores:
    """The scores of the N tokens of a text under E experts and their mixture, in nats.

    `tokens` are the tokens' texts; a character belongs to the token with its last UTF-8 byte. `ids` [N] int64 are their
    ids. `log_probabilities` [N, E] are log p of each token under each of `experts`, `weights` [N, E] the experts'
    weights when the token was predicted (each row sums to 1), and `mixture` [N] log p under the mixture, all float64.
    The values of a token are conditioned only on the tokens before it.
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
        """One row per token: the token, log p under the mixture, and for each expert log p and weight."""
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
    """The distribution of the token that follows a text.

    `log_probabilities` [V] float64 are log p in nats of every vocabulary entry under the mixture; `weights` [E] are the
    weights of `experts`, which sum to 1; `types` [V] are the texts of the vocabulary entries, with U+FFFD for bytes
    that are not UTF-8.
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
    """The results of `demix eval` for a text, with the fields of its `--json`; `print` shows them like the command.

    A perplexity is per token, `bits_per_byte` per byte of UTF-8, `behind` in nats per token; see
    `demix.evaluate.own_text.ExpertLine` and docs/how-to/eval-and-generate.md.
    """

    @property
    def table(self) -> "pd.DataFrame":
        """The results by name: mixtures, then experts from the best on; NaN for a missing value."""
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
    """A model and its `experts`, from `demix.load`.

    In the methods, `experts` are the experts to mix (default: all); the others have weight 0. `weights` is the mixing
    rule and `prior` the prior, named as in `demix generate`. Rules: `tempered` with the parameters that were chosen for
    the model, `switching`, `history`, `released`, `cluster`, `cluster+history`, `average`. Priors: `uniform`,
    `updating`, weights (`law=2,news=1`), or a domain of the run.
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
        """Score the tokens of one text, or of several texts, under every expert and the mixture.

        Several texts are scored together. The sum of a text's log p equals the sum that `demix lm-eval` gives for whole
        texts. Raises DemixError for an empty text.
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
        """The distribution after a text (which may be empty), from which `demix generate` samples."""
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
        """Continue a text by at most `tokens` tokens, like `demix generate`; `str` of the result is the continuation.

        `temperature` 0 chooses the likeliest token. Sampling uses only the likeliest tokens whose total probability is
        `top_p`. The returned log-probabilities are computed before temperature and `top_p` are applied.
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
        """Evaluate a text, or a file of documents in any format that `demix eval` reads, like that command.

        `field` is the field with the text in a file of records. As in training and scoring, and unlike in `score`, each
        document begins with an `<|endoftext|>` that counts as a token of the text.
        """
        return TextFigures(**vars(self._judge.result(text, self._judge.read(text, field))))

    @cached_property
    def _judge(self) -> Judge:
        return Judge(self.folder, self._trunks, self._tokenizer_file, self._device)

    def _mixture(self, experts: Sequence[str] | None, weights: str, prior: str) -> MixedModel:
        return mixture_of(self.folder, self._trunks, self.tokenizer, weights, prior, _names(experts))


@dataclass(frozen=True, eq=False)
class OpenedRun:
    """A run, from `demix.open_run`. Files are read when they are needed."""

    folder: Path
    _run: "QueryRun" = field(repr=False)

    @property
    def results(self) -> "pd.DataFrame":
        """The rows of results.parquet (docs/reference/files-results.md), checked as for the report."""
        from demix.report.read import read_results

        return read_results(self.folder / "results.parquet").rows

    def sql(self, query: str) -> "pd.DataFrame":
        """The rows of one SELECT, as in `demix sql` (docs/reference/sql-views.md lists the tables)."""
        from demix.query.ask import Answers
        from demix.query.output import distinct

        with Answers([self._run]) as answers, answers.ask(query) as reader:
            table = reader.read_all()
        return table.rename_columns(distinct(table.column_names)).to_pandas()


def _names(experts: Sequence[str] | None) -> list[str] | None:
    """Names of experts. A string is an error, because its characters would be taken as names."""
    if isinstance(experts, str):
        raise DemixError("experts", "is a string", f'give a list of names: ["{experts}"]')
    return None if experts is None else [*experts]


def _shown(table: "pd.DataFrame") -> str:
    """A table for a notebook."""
    text: str = table.to_html(na_rep="", float_format="{:.3f}".format)
    return text
